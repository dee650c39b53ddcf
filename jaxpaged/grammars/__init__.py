"""Grammars for structured outputs, on llguidance: compiled in threads, matched on the host, one matcher a sequence."""

from jaxpaged.grammars.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
