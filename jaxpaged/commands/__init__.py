"""The subcommands of `jaxpaged`: each module has `add_parser(commands)` and `run(args) -> exit status`."""
