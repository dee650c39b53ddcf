"""`LLM` over the real engine: a module in memory, its weights swapped, answers computed without paging."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import EOS, NUM_TOKENS, Alone, make_tiny_tokenizer, random_model, tiny_config

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import InvalidRequestError

PROMPTS = ["The cat", "sat on the mat, and then", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "warmup": False}
    with LLM.from_module(random_model(tiny_config()), make_tiny_tokenizer(), compilation_cache="", **options) as llm:
        yield llm


def greedy(model: nnx.Module, prompt: list[int], count: int) -> list[int]:
    """The most probable tokens by the dense forward pass."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != EOS:
        logits = np.asarray(model(jnp.array([tokens]))[0, -1])
        tokens.append(int(logits[:NUM_TOKENS].argmax()))
    return tokens[len(prompt) :]


def test_generate_chat_and_stream_give_the_models_tokens(llm: LLM, alone: Alone) -> None:
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    expected = [alone(prompt, 8, stop=frozenset([EOS])) for prompt in ids]
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
    assert [o.outputs[0].token_ids for o in llm.generate(ids, GREEDY, use_tqdm=False)] == expected
    pieces = [output.outputs[0] for output in llm.stream(PROMPTS[1], GREEDY)]
    assert [t for piece in pieces for t in piece.token_ids] == expected[1]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(expected[1], skip_special_tokens=True)

    [answer] = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert answer.prompt == "<user>Hi<bot>"
    assert answer.outputs[0].token_ids == alone(tokenizer(answer.prompt).input_ids, 8, stop=frozenset([EOS]))


def test_a_bad_prompt_among_good_ones_computes_nothing(llm: LLM) -> None:
    steps = llm.stats().steps_total
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        llm.generate([[1, 2], [999_999]], GREEDY)
    assert llm.stats().scheduler.num_waiting == 0
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].finished
    assert llm.stats().steps_total == steps + 1


def test_an_abandoned_stream_gives_its_blocks_back(llm: LLM) -> None:
    llm.reset_prefix_cache()
    free = llm.stats().scheduler.num_free_blocks
    for _ in llm.stream(PROMPTS[1], GREEDY):
        break
    stats = llm.stats().scheduler
    assert (stats.num_running, stats.num_free_blocks) == (0, free)


def test_new_weights_answer_as_the_new_model(llm: LLM) -> None:
    """After a first run whose prefix is cached: KV of the old weights must not be used."""
    trained = random_model(tiny_config(), seed=5)
    prompt = llm.get_tokenizer()(PROMPTS[1]).input_ids
    [before] = llm.generate([prompt], GREEDY)
    llm.update_weights(nnx.state(trained))
    [after] = llm.generate([prompt], GREEDY)
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids == greedy(trained, prompt, 8) != before.outputs[0].token_ids
