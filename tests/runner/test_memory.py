"""How large the pool gets, by hand-made numbers, and when the start is refused."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged.config import GIB, MIB, EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.runner.host_memory import available_bytes
from jaxpaged.runner.memory import eager_blocks, pool_blocks


def blocks(
    stats: dict[str, int] | None,
    *,
    max_model_len: int = 160,
    platform: str = "gpu",
    max_blocks: int | None = None,
    **options: Any,
) -> int:
    """Blocks of 1 MiB and 16 tokens, beside 2 GiB of weights and 1 GiB of temporaries."""
    device: Any = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    return pool_blocks(
        EngineConfig(**options),
        device,
        bytes_per_block=MIB,
        max_blocks=max_blocks,
        max_model_len=max_model_len,
        weights_bytes=2 * GIB,
        temporaries_bytes=GIB,
    )


def test_a_gpu_gives_what_weights_and_temporaries_leave() -> None:
    # 80 GiB x 0.5 - 2 - 1
    assert blocks({"bytes_limit": 80 * GIB, "bytes_in_use": 2 * GIB}, gpu_memory_utilization=0.5) == 37 * 1024


def test_what_else_the_process_holds_on_the_gpu_counts() -> None:
    assert blocks({"bytes_limit": 80 * GIB, "bytes_in_use": 12 * GIB}, gpu_memory_utilization=0.5) == 27 * 1024


def test_a_gpu_that_is_full_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"160 tokens needs 11\.00 MiB.*0 B.*2\.00 GiB less 2\.00 GiB.*1\.00 GiB"):
        blocks({"bytes_limit": 4 * GIB}, gpu_memory_utilization=0.5)


@pytest.mark.parametrize("stats", [None, {}])
def test_a_device_that_does_not_know_its_memory_needs_a_size(stats: dict[str, int] | None) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        blocks(stats)
    assert blocks(stats, kv_cache_memory=20 * MIB) == 20


def test_the_default_on_a_cpu() -> None:
    assert blocks(None, platform="cpu") == 1024


def test_one_request_of_the_longest_length_and_the_null_block_must_fit() -> None:
    assert blocks(None, num_blocks=11, max_model_len=160) == 11
    with pytest.raises(ConfigError, match=r"max_model_len=161 .* enough for 160 tokens; raise num_blocks"):
        blocks(None, num_blocks=11, max_model_len=161)


def test_slots_fit_an_int32() -> None:
    assert blocks(None, num_blocks=2**27 - 1) == 2**27 - 1
    with pytest.raises(ConfigError, match=r"134217728 blocks of 16 tokens .* 2147483647"):
        blocks(None, num_blocks=2**27)


def test_what_can_be_addressed_limits_a_pool_of_whatever_there_is(caplog: pytest.LogCaptureFixture) -> None:
    stats = {"bytes_limit": 80 * GIB}
    assert blocks(stats, gpu_memory_utilization=0.5, max_blocks=37 * 1024) == 37 * 1024 and not caplog.records
    assert blocks(stats, gpu_memory_utilization=0.5, max_blocks=3000, kv_cache_dtype="int8") == 3000
    (record,) = caplog.records
    assert "37888 blocks are more than the 3000 (2.93 GiB)" in record.getMessage()
    assert blocks(None, platform="cpu", max_blocks=1000) == 1000


@pytest.mark.parametrize("size", [{"num_blocks": 3001}, {"kv_cache_memory": 3001 * MIB}])
def test_what_can_be_addressed_refuses_a_pool_that_was_asked_for(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"3001 blocks .* 3000 .* 2 GiB.*lower num_blocks or kv_cache_memory, or"):
        blocks(None, max_blocks=3000, kv_cache_dtype="int8", **size)


def test_a_pool_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpaged.runner.memory.available_bytes", lambda: 3 * GIB)
    assert blocks(None, platform="cpu", kv_cache_memory=3 * GIB) == 3 * 1024
    with pytest.raises(
        ConfigError, match=r"4\.00 GiB is larger than the 3\.00 GiB .* lower kv_cache_memory or num_blocks"
    ):
        blocks(None, platform="cpu", kv_cache_memory=4 * GIB)
    monkeypatch.setattr("jaxpaged.runner.memory.available_bytes", lambda: None)
    assert blocks(None, platform="cpu", kv_cache_memory=4 * GIB) == 4 * 1024


def test_available_memory_is_what_the_system_says() -> None:
    left = available_bytes()
    if left is None:
        pytest.skip("this system does not say")
    assert 0 < left <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("options", "platform", "expected"),
    [
        ({}, "cpu", 32 * 24),  # 32 rows of 384 tokens in blocks of 16
        ({"block_size": 1000}, "cpu", 32),
        ({"kv_cache_memory": GIB}, "cpu", None),
        ({"num_blocks": 100}, "cpu", None),
        ({}, "gpu", None),
    ],
)
def test_cached_prefixes_alone_fill_only_a_pool_that_was_asked_for(
    options: dict[str, Any], platform: str, expected: int | None
) -> None:
    device: Any = SimpleNamespace(platform=platform)
    assert eager_blocks(EngineConfig(**options), device, max_num_seqs=32) == expected
