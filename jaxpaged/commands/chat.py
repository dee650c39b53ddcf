"""`jaxpaged chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpaged.commands.options import (
    MODEL_HELP,
    add_command,
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from jaxpaged.errors import InvalidRequestError, JaxpagedError
from jaxpaged.tokenizer import encode_rendered, render_chat

if TYPE_CHECKING:
    from jaxpaged.llm import LLM
    from jaxpaged.request import SamplingParams


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "chat",
        run,
        summary="talk to a model in the terminal",
        description=(
            "Talk to a model. /reset forgets the conversation, /exit (or Ctrl-D) ends it,\n"
            "Ctrl-C stops an answer. When the conversation grows too long, its oldest turns are forgotten."
        ),
        example='  jaxpaged chat smollm2-135m-instruct --system "Answer in one sentence."',
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser, max_num_seqs="1", warmup=False)
    parser.set_defaults(max_num_seqs=1, warmup=False)


def run(args: argparse.Namespace) -> int:
    from jaxpaged.llm import LLM

    with LLM(args.model, **engine_options(args)) as llm:
        params = replace(llm.get_default_sampling_params(), **sampling_options(args))
        converse(Conversation(llm, params, args.system))
    return 0


class Conversation:
    """What was said so far, and the next answer to it.

    Attributes:
        messages: the turns that the model still sees; the system message first, if there is one.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def reset(self) -> None:
        self.messages = list(self._system)

    def ask(self, text: str) -> Generator[str]:
        """Takes the user's next message; yields the answer piece by piece.

        What was yielded is kept as the answer, also when the caller stops early.

        Raises:
            InvalidRequestError: the message does not fit the model's context, even alone; it is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt_that_fits()
        except InvalidRequestError:
            self.messages.pop()
            raise
        answer = ""
        try:
            for output in self._llm.stream(prompt, self._params):
                answer += output.outputs[0].text
                yield output.outputs[0].text
                if output.error is not None:
                    raise JaxpagedError(output.error)
        finally:
            self.messages.append({"role": "assistant", "content": answer})

    def _prompt_that_fits(self) -> list[int]:
        """Token ids of the conversation, its oldest turns dropped until there is room for the answer."""
        tokenizer = self._llm.get_tokenizer()
        room = self._llm.max_model_len - min(self._params.max_tokens or 1, self._llm.max_model_len // 2)
        messages = self.messages
        while len(prompt := encode_rendered(tokenizer, render_chat(tokenizer, messages))) > room:
            turns = messages[len(self._system) :]
            if len(turns) == 1:
                raise InvalidRequestError(
                    f"the message takes {len(prompt)} tokens and {room} have room; shorten it", param="messages"
                )
            messages = [*self._system, *turns[2:]]
        self.messages = messages
        return prompt


def converse(conversation: Conversation) -> None:
    """Reads messages from standard input and answers each, until /exit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history for input())
    prompt = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            print("(forgotten)")
        elif text.startswith("/"):
            print(f"unknown command {text}; there are /reset and /exit", file=sys.stderr)
        elif text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    num_before = len(conversation.messages)
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
        print(" (stopped)", end="")
    except InvalidRequestError as error:
        print(f"jaxpaged: error: {error}", file=sys.stderr)
        return
    print()
    dropped = num_before + 2 - len(conversation.messages)
    if dropped:
        print(f"(the oldest {dropped} messages were forgotten: the conversation is too long)", file=sys.stderr)
