"""`LLM` over an engine made of arithmetic: what is queued, what comes back and what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import jaxpaged.llm
from jaxpaged import LLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxpaged.request import OutputKind
from jaxpaged.weights import GenerationConfig


class FakeTokenizer:
    """One token a character."""

    chat_template = "fake"
    eos_token_id = 3

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options.pop("tokenize") is False
        if messages[0]["role"] == "bad":
            raise ValueError("roles must alternate")
        end = "A:" if options["add_generation_prompt"] else ""
        return "".join(f"{m['role']}:{m['content']};" for m in messages) + options.get("mark", "") + end


@dataclass
class Running:
    prompt: Any
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """Each step gives every request the token `len(prompt) + i`; a request of length n ends after n tokens.

    Attributes:
        interrupt_at: step that is interrupted by Ctrl-C.
    """

    def __init__(self, model: Any = None, tokenizer: Any = None, config: Any = None, **options: Any) -> None:
        self.model, self.config, self.options = model, config, options
        self.tokenizer = tokenizer or FakeTokenizer()
        self.generation = options.get("generation") or GenerationConfig()
        self.scheduler_config = SimpleNamespace(max_model_len=64)
        self.running: dict[str, Running] = {}
        self.added: list[tuple[Any, SamplingParams, int]] = []
        self.steps = 0
        self.interrupt_at: int | None = None

    def validate(self, prompt: Any, params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt is empty")

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0) -> None:
        self.validate(prompt, params)
        assert request_id not in self.running
        self.running[request_id] = Running(prompt, params)
        self.added.append((prompt, params, priority))

    def abort_request(self, request_id: str) -> bool:
        return self.running.pop(request_id, None) is not None

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        outputs = []
        for request_id, request in list(self.running.items()):
            request.tokens.append(len(request.prompt) + len(request.tokens))
            finished = len(request.tokens) == len(request.prompt)
            if finished:
                del self.running[request_id]
            delta = request.params.output_kind is OutputKind.DELTA
            if delta or finished:
                ids = request.tokens[-1:] if delta else list(request.tokens)
                completion = CompletionOutput(0, "x" * len(ids), ids, finish_reason="length" if finished else None)
                prompt = request.prompt if isinstance(request.prompt, str) else None
                outputs.append(RequestOutput(request_id, prompt, [], [completion], finished, RequestMetrics(0.0)))
        return outputs[::-1]

    def stats(self) -> Any:
        return SimpleNamespace(generation_tokens_total=self.steps)

    def shutdown(self) -> None:
        self.running.clear()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    fake = FakeEngine()
    monkeypatch.setattr(jaxpaged.llm.Engine, "from_pretrained", lambda model, config: fake)
    yield fake
    assert not fake.running, "a request was left behind"


@pytest.fixture
def llm(engine: FakeEngine) -> LLM:
    return LLM("any")


def expected(prompt: Any) -> list[int]:
    return [len(prompt) + i for i in range(len(prompt))]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["aaaa", "b", [5, 6, 7], "cc"]
    outputs = llm.generate(prompts)
    assert [o.outputs[0].token_ids for o in outputs] == [expected(p) for p in prompts]
    assert [o.prompt for o in outputs] == ["aaaa", "b", None, "cc"]
    assert "4/4" in capsys.readouterr().err
    llm.generate(prompts, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompts", "queued"),
    [
        ("ab", ["ab"]),
        ([4, 5], [[4, 5]]),
        (["ab", "c"], ["ab", "c"]),
        ([[4], [5, 6]], [[4], [5, 6]]),
        ([], []),
        ({"prompt": "ab"}, ["ab"]),
        ([{"prompt": "ab"}, "c", {"prompt": "d", "prompt_token_ids": [4]}], ["ab", "c", [4]]),
    ],
)
def test_one_prompt_or_many(llm: LLM, engine: FakeEngine, prompts: Any, queued: list[Any]) -> None:
    assert len(llm.generate(prompts)) == len(queued)
    assert [prompt for prompt, _, _ in engine.added] == queued


@pytest.mark.parametrize("prompts", [["ab", 3], [["a"]], [None], [[1], 2], {}, [{"prompt": 3}]])
def test_what_is_no_prompt_is_refused(llm: LLM, engine: FakeEngine, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is no prompt"):
        llm.generate(prompts)
    assert engine.added == []


def test_a_prompt_with_more_than_a_text_is_refused(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="has the key 'multi_modal_data'"):
        llm.generate({"prompt": "ab", "multi_modal_data": {"image": "x"}})
    assert engine.added == []


def test_one_bad_prompt_leaves_nothing_queued(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["aa", "", "bb"])
    assert engine.steps == 0 and not engine.running


def test_ctrl_c_aborts_what_was_queued(llm: LLM, engine: FakeEngine) -> None:
    engine.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "bbbb", "cccc"])
    assert not engine.running
    assert llm.generate("dd")[0].outputs[0].token_ids == expected("dd")


def test_parameters_for_all_or_for_each(llm: LLM, engine: FakeEngine) -> None:
    hot, cold = SamplingParams(temperature=1.5), SamplingParams(temperature=0.5, output_kind=OutputKind.DELTA)
    llm.generate(["a", "b"], hot)
    llm.generate(["a", "b"], [hot, cold], priority=[2, 1])
    assert [(p.temperature, priority) for _, p, priority in engine.added] == [(1.5, 0), (1.5, 0), (1.5, 2), (0.5, 1)]
    assert all(p.output_kind is OutputKind.FINAL_ONLY for _, p, _ in engine.added)
    with pytest.raises(InvalidRequestError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [hot])
    with pytest.raises(InvalidRequestError, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], hot, priority=[1])


def test_default_parameters_are_the_models(llm: LLM, engine: FakeEngine) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    engine.generation = GenerationConfig(temperature=0.6, top_k=20)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    llm.generate("a")
    assert engine.added[0][1].temperature == 0.6


def test_chat_renders_and_adds_no_special_tokens_again(llm: LLM, engine: FakeEngine) -> None:
    hello, bye = [{"role": "u", "content": "hi"}], [{"role": "u", "content": "bye"}]
    [output] = llm.chat(hello)
    assert output.prompt == "u:hi;A:"
    assert engine.added[0][0] == [ord(c) for c in "u:hi;A:"]
    outputs = llm.chat([hello, bye], add_generation_prompt=False, chat_template_kwargs={"mark": "!"}, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["u:hi;!", "u:bye;!"]


def test_tools_and_calls_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def render(_self: FakeTokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
        seen.append((messages, options["tools"]))
        return "text"

    monkeypatch.setattr(FakeTokenizer, "apply_chat_template", render)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parsed = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    llm.chat(chat, tools=tools)
    [(messages, shown)] = seen
    assert shown == tools
    assert messages == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "tool_call_id": "1", "content": "2", "name": "f"},
    ]
    assert chat[1]["content"] is None, "what was given does not change"
    llm.chat(chat[:1])
    assert seen[1][1] is None


def test_chats_that_cannot_be_rendered_are_refused(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        llm.chat([[{"role": "u", "content": "hi"}], [{"role": "bad", "content": ""}]])
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        llm.chat([{"role": "u", "content": "hi"}], continue_final_message=True)
    engine.tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "u", "content": "hi"}])
    assert engine.added == []


def test_stream_yields_deltas(llm: LLM) -> None:
    outputs = list(llm.stream("aaa", SamplingParams()))
    assert [o.outputs[0].token_ids for o in outputs] == [[3], [4], [5]]
    assert [o.finished for o in outputs] == [False, False, True]


def test_a_bad_stream_is_refused_at_the_call(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.stream("")


def test_closing_or_dropping_a_stream_aborts_it(llm: LLM, engine: FakeEngine) -> None:
    stream = llm.stream("aaa")
    assert not engine.running
    next(stream)
    assert engine.running
    stream.close()
    assert not engine.running
    for _ in llm.stream("aaa"):
        break
    assert not engine.running


def test_streams_and_generate_may_interleave(llm: LLM) -> None:
    first, second = llm.stream("aaaa"), llm.stream("bb")
    got_first, got_second = [next(first)], [next(second)]
    [whole] = llm.generate("ccc")
    got_first += first
    got_second += second
    assert [o.outputs[0].token_ids for o in got_first] == [[4], [5], [6], [7]]
    assert [o.outputs[0].token_ids for o in got_second] == [[2], [3]]
    assert whole.outputs[0].token_ids == expected("ccc")


def test_a_stream_ends_with_an_error_when_the_llm_is_shut_down(engine: FakeEngine) -> None:
    with LLM("any") as llm:
        stream = llm.stream("aaa")
        next(stream)
    with pytest.raises(EngineDeadError, match="shut down"):
        next(stream)


def test_from_module_passes_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxpaged.llm, "Engine", FakeEngine)
    module, tokenizer = object(), FakeTokenizer()
    engine = LLM.from_module(module, tokenizer, block_size=8, kv_cache_memory="1MiB")._engine
    assert engine.model is module and engine.tokenizer is tokenizer
    assert engine.config == EngineConfig(block_size=8, kv_cache_memory=1 << 20)
    assert engine.options["generation"].eos_token_ids == (3,)
    assert LLM.from_module(module, None)._engine.options["generation"].eos_token_ids == ()
    engine = LLM.from_module(module, tokenizer, eos_token_ids=[7, 8])._engine
    assert engine.options["generation"].eos_token_ids == (7, 8)


def test_an_unknown_option_is_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="unknown option 'blocksize'"):
        LLM("no/such/model", blocksize=8)
