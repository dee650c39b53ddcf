"""The command line: what flags become, and what a user sees when something is wrong."""

from __future__ import annotations

import gc
import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxpaged.llm
import jaxpaged.weights
from jaxpaged.cli import build_parser, main
from jaxpaged.commands.chat import Conversation, converse
from jaxpaged.commands.options import engine_options
from jaxpaged.commands.serve import server_config
from jaxpaged.config import GIB, EngineConfig, ModelConfig
from jaxpaged.errors import ConfigError, InvalidRequestError, JaxpagedError, ModelLoadError
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.server import ServerConfig

COMMANDS = ("serve", "generate", "chat", "pull", "convert", "plan", "trace", "view", "version")


def engine_config(*flags: str) -> EngineConfig:
    return EngineConfig.from_options(engine_options(build_parser().parse_args(["serve", "m", *flags])))


def test_no_flag_leaves_every_default() -> None:
    args = build_parser().parse_args(["serve", "m"])
    assert EngineConfig.from_options(engine_options(args)) == EngineConfig()
    assert server_config(args, None) == ServerConfig()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max-model-len", "2K"], {"max_model_len": 2048}),
        (["--max-model-len", "2k"], {"max_model_len": 2000}),
        (["--max-model-len", "1.5k"], {"max_model_len": 1500}),
        (["--max-num-seqs", "8"], {"max_num_seqs": 8}),
        (["--max-num-batched-tokens=1024"], {"max_num_batched_tokens": 1024}),
        (["--block-size", "32"], {"block_size": 32}),
        (["--kv-cache-dtype", "fp8"], {"kv_cache_dtype": "fp8"}),
        (["--kv-cache-memory-bytes", "4GiB"], {"kv_cache_memory": 4 * GIB}),
        (["--kv-cache-memory-bytes", "1048576"], {"kv_cache_memory": 1 << 20}),
        (["--num-gpu-blocks-override", "99"], {"num_blocks": 99}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--swap-space", "2"], {"swap_space": 2 * GIB}),
        (["--swap-space", "0.5"], {"swap_space": GIB // 2}),
        (["--swap-space", "512MiB"], {"swap_space": GIB // 2}),
        (["-q", "q4_0"], {"quantization": "q4_0"}),
        (["--quantization", "none"], {"quantization": "none"}),
        (["--dtype", "bfloat16", "--seed", "3"], {"dtype": "bfloat16", "seed": 3}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (
            ["--no-enable-chunked-prefill", "--max-model-len", "64"],
            {"enable_chunked_prefill": False, "max_model_len": 64},
        ),
        (["--long-prefill-token-threshold", "100"], {"long_prefill_token_threshold": 100}),
        (["--scheduling-policy", "priority"], {"scheduling_policy": "priority"}),
        (["--preemption-mode", "swap", "--swap-space", "1"], {"preemption_mode": "swap", "swap_space": GIB}),
        (["--watermark", "0.01", "--max-num-queued-reqs", "5"], {"watermark": 0.01, "max_num_queued_requests": 5}),
        (["--max-logprobs", "5"], {"max_logprobs": 5}),
        (["--attention", "reference"], {"attention": "reference"}),
        (["--compilation-cache-dir", "/x", "--no-warmup"], {"compilation_cache": "/x", "warmup": False}),
        (["--trust-remote-code"], {"trust_remote_code": True}),
    ],
)
def test_engine_flags(flags: list[str], expected: dict[str, Any]) -> None:
    assert engine_config(*flags) == EngineConfig(**expected)


def test_server_flags(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("from a file")
    flags = (
        "--host 127.0.0.1 --port 9 --uds /s --api-key a b --metrics-public --allowed-origins x y "
        "--max-request-bytes 8MiB --max-concurrent-requests 1K --shutdown-timeout 2.5 --enable-request-id-headers "
        "--enable-dev-endpoints --no-vllm-metric-aliases --served-model-name n1 n2 --trust-request-chat-template "
        "--response-role bot --enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes "
        "--reasoning-parser qwen3"
    )
    args = build_parser().parse_args(["serve", "m", *flags.split(), "--chat-template", str(template)])
    assert server_config(args, "unused") == ServerConfig(
        host="127.0.0.1",
        port=9,
        uds="/s",
        api_keys=("a", "b"),
        metrics_public=True,
        allowed_origins=("x", "y"),
        max_request_bytes=8 << 20,
        max_concurrent_requests=1024,
        shutdown_timeout_s=2.5,
        enable_request_id_headers=True,
        enable_dev_endpoints=True,
        vllm_metric_aliases=False,
        served_model_names=("n1", "n2"),
        chat_template="from a file",
        trust_request_chat_template=True,
        response_role="bot",
        enable_prompt_tokens_details=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )


def test_server_values_that_come_in_other_shapes() -> None:
    def parse(*flags: str, key: str | None = None) -> ServerConfig:
        return server_config(build_parser().parse_args(["serve", "m", *flags]), key)

    assert parse(key="secret").api_keys == ("secret",)
    assert parse("--allowed-origins", '["a", "b"]').allowed_origins == ("a", "b")
    assert parse("--chat-template", "{{ messages }}").chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="cannot read the chat template /no/such"):
        parse("--chat-template", "/no/such")
    for origins in ("[a", "[1]", "[" * 100_000):
        with pytest.raises(ConfigError, match="no JSON list"):
            parse("--allowed-origins", origins)
    with pytest.raises(ConfigError, match="the chat template is not valid Jinja: line 2: "):
        parse("--chat-template", "{{ messages }}\n{% if %}")
    parse("--chat-template", "{% generation %}{{ raise_exception('no messages') }}{% endgeneration %}")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"jaxpaged {command}" in capsys.readouterr().out.split("Example:")[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve"], "MODEL"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["serve", "m", "--max-model-len", "4Q"], "'4Q' is not a whole number"),
        (["serve", "m", "--max-model-len", "1.0001k"], "is not a whole number"),
        (["serve", "m", "--kv-cache-memory-bytes", "lots"], "'lots' is not a size in bytes"),
        (["serve", "m", "--swap-space", "lots"], "'lots' is not a size in bytes"),
        (["serve", "m", "--swap-space", "inf"], "'inf' is not a size in bytes"),
        (["serve", "m", "--swap-space", "9" * 400], "is not a size in bytes"),
        (["serve", "m", "--kv-cache-memory-bytes", "9" * 400], "is not a size in bytes"),
        (["serve", "m", "--max-model-len", "9" * 400], "is not a whole number"),
        (["serve", "m", "--dtype", "int3"], "invalid choice: 'int3'"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_exits_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["serve", "m", "--port", "70000"], 2, "port is 70000"),
        (["serve", "m", "--preemption-mode", "swap"], 2, "swap_space is 0"),
        (["serve", "no/such/model/here"], 1, "no/such/model/here"),
        (["generate", "no/such/model/here", "text"], 1, "no/such/model/here"),
        (["chat", "no/such/model/here"], 1, "no/such/model/here"),
        (["convert", "no/such/model/here", "dst"], 1, "no/such/model/here"),
        (["pull", "no/such/model/here"], 1, "no/such/model/here"),
        (["generate", "m", ""], 2, "the prompt is empty"),
    ],
)
def test_known_errors_are_one_line(
    argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    error = capsys.readouterr().err
    assert error.startswith("jaxpaged: error: ") and message in error
    assert error.count("\n") == 1


def test_a_server_that_does_not_start_leaves_the_collector_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "m", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]) != 0
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ModelLoadError("x is missing"), 1, "jaxpaged: error: x is missing\n"),
        (InvalidRequestError("too long"), 2, "jaxpaged: error: too long\n"),
    ],
)
def test_exit_status(
    raised: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise raised

    monkeypatch.setattr(jaxpaged.weights, "resolve", fail)
    assert main(["pull", "x"]) == status
    assert capsys.readouterr().err == said


def test_pull_prints_the_path_and_without_a_name_the_catalog(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jaxpaged.weights, "resolve", lambda name: SimpleNamespace(path=Path("/cache") / name))
    assert main(["pull", "some-model"]) == 0
    assert capsys.readouterr().out == "/cache/some-model\n"
    assert main(["pull"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_convert_passes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(jaxpaged.weights, "convert", lambda *args, **options: calls.append((args, options)))
    assert main(["convert", "a", "b"]) == 0
    assert main(["convert", "a", "b", "--dtype", "bfloat16", "--overwrite"]) == 0
    assert calls == [
        (("a", "b"), {"dtype": "auto", "overwrite": False}),
        (("a", "b"), {"dtype": "bfloat16", "overwrite": True}),
    ]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert f"jaxpaged {jaxpaged.__version__}" in out and "\njax " in out and "\npython 3." in out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxpaged {jaxpaged.__version__}\n"


class WordTokenizer:
    """One token a word; a chat is its messages' words, each message with its role before it."""

    chat_template = "words"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return text.split()

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return " ".join(f"{m['role']} {m['content']}" for m in messages)


class FakeLLM:
    """Answers "one two three" in three pieces.

    Attributes:
        interrupt: raise Ctrl-C after the first piece of the next answer.
    """

    max_model_len = 20

    def __init__(self, model: str = "", **options: Any) -> None:
        self.options = options
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.interrupt = False
        self.error: str | None = None

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_tokenizer(self) -> WordTokenizer:
        return WordTokenizer()

    def recording(self, file: object) -> AbstractContextManager[None]:
        return nullcontext()

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.7)

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt if isinstance(prompt, str) else " ".join(prompt))
        self.params.append(params)
        for piece in ("one ", "two ", "three"):
            completion = CompletionOutput(0, piece, [1])
            yield RequestOutput("r", None, [], [completion], False, RequestMetrics(0.0), error=self.error)
            if self.interrupt:
                raise KeyboardInterrupt


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    def start(model: str, **options: Any) -> FakeLLM:
        fake.options = options
        return fake

    monkeypatch.setattr(jaxpaged.llm, "LLM", start)
    return fake


def test_generate_streams_the_prompt_or_standard_input(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-tokens", "9", "--top-k", "5", "--stop", "a", "--stop", "b", "--block-size", "8"]
    assert main(["generate", "m", "hello", *flags]) == 0
    assert capsys.readouterr().out == "one two three\n"
    assert llm.prompts == ["hello"]
    assert llm.params == [SamplingParams(temperature=0.7, max_tokens=9, top_k=5, stop=("a", "b"))]
    assert llm.options == {"block_size": 8, "max_num_seqs": 1, "warmup": False}
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert main(["generate", "m", "--max-num-seqs", "4"]) == 0
    assert llm.prompts[1] == "from stdin" and llm.options["max_num_seqs"] == 4


def test_generate_reports_a_failed_step(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.error = "out of memory"
    assert main(["generate", "m", "hello"]) == 1
    assert "jaxpaged: error: out of memory" in capsys.readouterr().err


def talk(llm: FakeLLM, lines: str, monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> Conversation:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    conversation = Conversation(llm, SamplingParams(max_tokens=4), system)
    converse(conversation)
    return conversation


def test_chat_keeps_the_history(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = talk(llm, "hi\n\nagain\n/exit\nnever\n", monkeypatch, system="be nice")
    assert llm.prompts == [
        "system be nice user hi",
        "system be nice user hi assistant one two three user again",
    ]
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert capsys.readouterr().out == "one two three\none two three\n"


def test_chat_reset_and_unknown_commands(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(llm, "hi\n/reset\n/what\nagain\n", monkeypatch, system="be nice")
    assert llm.prompts[1] == "system be nice user again"
    captured = capsys.readouterr()
    assert "(forgotten)" in captured.out and "unknown command /what" in captured.err


def test_chat_forgets_the_oldest_turns_and_says_so(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 tokens have room: system and two turns fit, the third does not."""
    conversation = talk(llm, "a b c\nd e f\ng h i\n", monkeypatch, system="s")
    assert llm.prompts[1] == "system s user a b c assistant one two three user d e f"
    assert llm.prompts[2] == "system s user d e f assistant one two three user g h i"
    assert len(conversation.messages) == 5
    assert "oldest 2 messages were forgotten" in capsys.readouterr().err


def test_chat_refuses_a_message_that_never_fits_and_goes_on(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(llm, "x " * 30 + "\nhi\n", monkeypatch)
    assert llm.prompts == ["user hi"]
    assert "the message takes 31 tokens and 16 have room" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_keeps_what_came(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.interrupt = True
    conversation = talk(llm, "hi\n", monkeypatch)
    assert conversation.messages[-1] == {"role": "assistant", "content": "one "}
    assert "one  (stopped)" in capsys.readouterr().out


def test_chat_raises_when_the_engine_fails(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.error = "boom"
    with pytest.raises(JaxpagedError, match="boom"):
        talk(llm, "hi\n", monkeypatch)


PLAN = "plan --layers 32 --kv-heads 8 --head-dim 128 --dtype float16 --pool 60GiB --tokens 350 --json"


@pytest.mark.parametrize(
    "code",
    [
        "import jaxpaged",
        "from jaxpaged import SamplingParams, EngineConfig; import jaxpaged; jaxpaged.__version__; dir(jaxpaged)",
        "from jaxpaged.cli import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass",
        f"from jaxpaged.cli import main; assert main({PLAN.split()!r}) == 0",
    ],
)
def test_no_heavy_import_before_it_is_needed(code: str) -> None:
    check = "import sys; print([m for m in ('jax', 'flax', 'transformers', 'torch', 'aiohttp') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_lazy_names_are_the_real_ones() -> None:
    import jaxpaged

    assert set(jaxpaged.__all__) <= set(dir(jaxpaged))
    for name in jaxpaged.__all__:
        assert getattr(jaxpaged, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxpaged.nothing


def test_a_closed_pipe_is_no_traceback() -> None:
    run = subprocess.run(
        f"{sys.executable} -m jaxpaged.cli pull | true", shell=True, capture_output=True, text=True, check=False
    )
    assert run.stderr == ""


SHAPE = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "float16"]
POOL = ["--pool", "60GiB", "--block-size", "16", "--reserve", "2048"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tokens", "350"], {"requests": 1396, "requests_reserved": 240, "shared_blocks": 0}),
        (["--tokens", "2000"], {"requests": 245, "requests_reserved": 240, "shared_blocks": 0}),
        (["--tokens", "2000", "--shared-prefix", "1500"], {"requests": 957, "shared_blocks": 93}),
    ],
)
def test_plan_gives_the_known_numbers(
    flags: list[str], expected: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHAPE, *POOL, *flags, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes_per_token"] == 128 * 1024
    assert figures["blocks"] == 30_720
    assert expected.items() <= figures.items()


def test_plan_prints_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHAPE, *POOL, "--tokens", "2000", "--shared-prefix", "1500"]) == 0
    out = capsys.readouterr().out
    for line in (
        "2 (K, V) x 32 layers x 8 heads x 128 x 2 bytes (float16) = 128.00 KiB",
        "60.00 GiB / 2.00 MiB = 30,720 blocks",
        "2,000 tokens / 16 = 125 blocks",
        "1,500 tokens: 93 full blocks, stored once; 32 of its own",
        "(30,719 - 93) / 32 = 957",
        "30,719 / 125 = 245",
        "(2,048 tokens x 128.00 KiB) = 240",
    ):
        assert line in out


def test_plan_of_a_quantized_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHAPE, "--pool", "60GiB", "--tokens", "2000", "--kv-cache-dtype", "int8"]) == 0
    out = capsys.readouterr().out
    assert "2 (K, V) x 32 layers x 8 heads x (128 x 1 byte (int8) + 4 bytes of scale) = 66.00 KiB" in out
    assert f"60.00 GiB / 1.03 MiB = {60 * 1024 * 1024 // (66 * 16):,} blocks" in out


def test_plan_of_given_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ",".join(map(str, np.random.default_rng(7).integers(50, 600, 40)))
    assert main([*SHAPE, "--reserve", "2048", "--lengths", lengths]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [
        "40 reserved     10.00 GiB, 82.2% of it holds no token",
        "40 paged        1.81 GiB, 2.1% of it holds no token",
    ]
    assert main([*SHAPE, "--reserve", "2048", "--lengths", lengths, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["reserved"]["num_bytes"] == 10 * GIB and round(figures["paged"]["waste"], 3) == 0.021
    assert main([*SHAPE, "--reserve", "100", "--lengths", "50,101"]) == 2
    assert "101" in capsys.readouterr().err


def test_plan_takes_the_shape_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig("LlamaForCausalLM", 9, 9, 9, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
                         max_position_embeddings=8192, dtype="bfloat16")  # fmt: skip
    monkeypatch.setattr(jaxpaged.weights, "resolve", lambda name: name)
    monkeypatch.setattr(jaxpaged.weights, "load_config", lambda files: config)
    assert main(["plan", "m", "--json", "--tokens", "1K"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert (figures["reserve"], figures["tokens"], figures["pool_bytes"]) == (8192, 1024, GIB)
    assert main(["plan", "m", "--json", "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 2 * 30 * 3 * 64 * 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan"], "give a model, or its shape: --layers, --kv-heads, --head-dim missing"),
        (["plan", "--layers", "2", "--head-dim", "8"], "--kv-heads missing"),
        (["plan", "m", "--layers", "2"], "not both"),
        ([*SHAPE, "--tokens", "20", "--shared-prefix", "30"], "shared_prefix is 30"),
        ([*SHAPE, "--pool", "1KiB"], "enlarge the pool"),
    ],
)
def test_plan_refuses_what_makes_no_sense(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err
