"""How launches, registers and spills are read out of what XLA and ptxas print; needs neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_program import Kernel, layer_launches, parse_ptxas, read_launches
from gpu_targets import TARGETS

# Shortened by hand from a dump of XLA: a command buffer of five launches, a loop and a branch, and a launch at the end.
SEQUENCE = """\
000: kCommandBuffer [source        | next=014 (1) ]
    001: kCustomKernel [source       | next=005 (4)] loop_fusion grid: [8, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
    002: kCustomKernel [source       | next=003 (1)] paged_decode grid: [3, 32, 8] threads: [128, 1, 1]  shared_memory: 37376 bytes
    003: kCopy         [source       | sink        ] kCopy
    004: kCustomKernel [prev=003 (1) | next=005 (1)] paged_decode grid: [3, 32, 8] threads: [128, 1, 1]  shared_memory: 37376 bytes
    005: kGemm         [prev=003 (1) | sink        ] cublas_gemm
014: kWhile         [prev=000 (1)  | next=000 (1) ]
condition:
    015: kCustomKernel [source | sink] wrapped_compare_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=025 (1)]
        016: kCustomKernel [source       | sink        ] loop_gather grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
        017: kCopy         [source       | sink        ] kCopy
1248: kConditional   [prev=000 (1) | next=000 (1)]
  false_branch:
    No thunks.  true_branch:
    1240: kCustomKernel [source        | next=1242 (2)] loop_broadcast grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
1314: kCopy          [prev=1313 (1) | sink         ] kCopy
"""  # noqa: E501

PTXAS = """\
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'paged_decode' for 'sm_90a'
ptxas info    : Function properties for paged_decode
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compile time = 155.904 ms
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'input_reduce_fusion' for 'sm_90a'
ptxas info    : Function properties for input_reduce_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 3.157 ms
"""


def test_launches_are_told_from_containers_and_from_what_loops_hold(tmp_path: Path) -> None:
    (tmp_path / "module_1.jit_f.thunk_sequence.txt").write_text("001: kCopy [source | sink] kCopy\n")
    (tmp_path / "module_1.jit_f.thunk_sequence_after_thunk_passes.txt").write_text(SEQUENCE)
    launches = read_launches(tmp_path)
    always = [launch.name for launch in launches if not launch.is_dynamic]
    assert always == ["loop_fusion", "paged_decode", "kCopy", "paged_decode", "cublas_gemm", "kCopy"]
    sometimes = [launch.name for launch in launches if launch.is_dynamic]
    assert sometimes == ["wrapped_compare_1", "loop_gather", "kCopy", "loop_broadcast"]
    assert {launch.shared_memory for launch in launches if launch.name == "paged_decode"} == {37376}


def test_a_layer_begins_at_a_kernel_that_runs_once_in_each(tmp_path: Path) -> None:
    (tmp_path / "module_1.jit_f.thunk_sequence.txt").write_text(SEQUENCE)
    launches = read_launches(tmp_path)
    assert layer_launches(launches, num_layers=2) == ["paged_decode", "kCopy"]
    assert layer_launches(launches, num_layers=0) == []
    assert layer_launches(launches, num_layers=3) == []  # nothing runs three times


def test_a_dump_without_a_sequence_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="thunk_sequence"):
        read_launches(tmp_path)


def test_ptxas_tells_registers_spills_and_shared_memory() -> None:
    assert parse_ptxas(PTXAS, {"paged_decode": 37376, "input_reduce_fusion": 0}) == [
        Kernel("paged_decode", registers=128, spilled=20, shared_memory=37376),
        Kernel("input_reduce_fusion", registers=18, spilled=0, shared_memory=1024),
    ]


@pytest.mark.parametrize(
    ("name", "arch", "words"),
    [
        ("h200", "sm_90a", ["major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES", "core_count: 132"]),
        ("a100", "sm_80", ["{ major: 8 minor: 0 }", "shared_memory_per_block_optin: 166912", "core_count: 108"]),
        ("l4", "sm_89", ["{ major: 8 minor: 9 }", "shared_memory_per_core: 102400", "threads_per_core_limit: 1536"]),
        ("b200", "sm_100a", ["major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES", "core_count: 148"]),
    ],
)
def test_targets_have_the_figures_of_their_data_sheets(name: str, arch: str, words: list[str]) -> None:
    assert TARGETS[name].arch == arch
    assert all(word in TARGETS[name].config for word in words)
