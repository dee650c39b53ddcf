"""What tests of the native kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxpaged_kernels import native


@pytest.fixture(params=native.INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has, in use while the test runs."""
    if (reason := native.why_unavailable()) is not None:
        pytest.skip(reason)
    best = native.instruction_set()
    if not native.use_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.use_instruction_set(best)
