"""`SamplingParams` says what is wrong with a value in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"frequency_penalty": 3}, "frequency_penalty is 3, but must be between -2 and 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan, but must be a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be between 1e-30 and 1e.30"),
        ({"repetition_penalty": True}, "finite number"),
        ({"min_tokens": 17}, "min_tokens is 17, .* at most max_tokens"),
        ({"min_tokens": 1.0}, "min_tokens is 1.0"),
        ({"logit_bias": [1]}, "a mapping"),
        ({"logit_bias": {"x": 1}}, "the key 'x', but keys must be token ids"),
        ({"logit_bias": {"²": 1}}, "keys must be token ids"),
        ({"logit_bias": {1.0: 1}}, "keys must be token ids"),
        ({"logit_bias": {True: 1}}, "keys must be token ids"),
        ({"logit_bias": {-1: 1}}, "keys must be token ids"),
        ({"logit_bias": {1: "x"}}, r"logit_bias\[1\] is 'x', but must be a finite number"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "1025 ids, but at most 1024"),
        ({"bad_words": "text"}, "bad_words is text, but must be a list"),
        ({"bad_words": ["a", "\t"]}, "not blank"),
        ({"bad_words": ["a"] * 129}, "129 entries, but at most 128"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids has '1', but must hold token ids"),
        ({"logprob_token_ids": range(129)}, "129 ids, but at most 128"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        ({"stop_token_ids": range(129), "min_tokens": 1}, "129 ids, but with min_tokens at most 128"),
    ],
    ids=str,
)
def test_bad_values(params: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**params)
    assert caught.value.param in params and "\n" not in str(caught.value)


def test_values_are_brought_to_one_form_which_stays() -> None:
    params = SamplingParams(
        logit_bias={"7": 1000, 8: -0.5}, logprob_token_ids=[3, 3, 2], allowed_token_ids=[5, 5], bad_words=["x"]
    )
    assert params.logit_bias == {7: 100, 8: -0.5}
    assert (params.logprob_token_ids, params.allowed_token_ids, params.bad_words) == ((3, 2), (5,), ("x",))
    assert params.wants_logprobs and not SamplingParams().wants_logprobs
    assert replace(params, seed=1) == replace(replace(params, seed=1), seed=1)
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
