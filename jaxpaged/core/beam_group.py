"""A beam search's request between two steps: from what the model says of its beams to who goes on in which blocks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxpaged.core.beam import Survivor, num_candidates
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.plan import FloatArray, IntArray
from jaxpaged.request import Request, Sequence


def rank_beams(
    request: Request,
    drawn: list[Sequence],
    top: tuple[IntArray, FloatArray],
    *,
    stop_ids: Collection[int],
    max_tokens: int,
) -> dict[int, Survivor]:
    """As `BeamSearch.advance`.

    Args:
        drawn: the beams, each with all its tokens computed; the leader alone where these are the first tokens.
        top: [len(drawn), K] most probable next tokens of each, and their log-probabilities.
    """
    sequences = request.sequences
    assert request.beams is not None
    is_first = not sequences[0].output_token_ids
    assert drawn == sequences[:1] if is_first else len(drawn) == len(sequences), f"beams apart: {drawn}"
    shape = len(sequences), num_candidates(len(sequences), stop_ids)
    token_ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    order = [s.index for s in drawn]
    token_ids[order], logprobs[order] = (array[:, : shape[1]] for array in top)
    return request.beams.advance(
        [s.output_token_ids for s in sequences],
        token_ids,
        logprobs,
        stop_ids=stop_ids,
        vocab_size=request.vocab_size,
        max_tokens=max_tokens,
    )


def fork_beams(kv: KVManager, sequences: list[Sequence], going_on: dict[int, Survivor]) -> None:
    """Gives every sequence the tokens and blocks of who goes on in its place; the blocks of the others are free."""
    outputs = {i: [*sequences[s.parent].output_token_ids, s.token_id] for i, s in going_on.items()}
    for index, survivor in going_on.items():
        if index != survivor.parent:
            kv.free(sequences[index])
            kv.fork(sequences[survivor.parent], sequences[index])
    for sequence in sequences:
        sequence.output_token_ids = outputs[sequence.index]
