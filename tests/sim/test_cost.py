"""The cost model: a step worked out by hand, constants found again from steps that obey them, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import random_model, tiny_config

from jaxpaged.errors import ConfigError
from jaxpaged.sim.calibration import Calibration, MeasuredStep, fit_constants, read_calibration, write_calibration
from jaxpaged.sim.cost import Constants, CostModel, StepLoad
from jaxpaged.sim.devices import DEVICES, Device, find_device
from jaxpaged.sim.shapes import ModelShape, opt_shape

SHAPE = ModelShape(
    name="by hand",
    num_layers=2,
    hidden_size=100,
    vocab_size=1000,
    params=1_100_000,
    matmul_params=1_000_000,
    head_params=100_000,
    attention_width=100,
    dtype_bytes=2,
    kv_token_bytes=800,
)
DEVICE = Device("by hand", 10**9, bandwidth=1e9, flops=1e12, host_link=1e8, link=1e8)
IDEAL = Constants(0.0, 0.0, 1.0, 1.0, 1.0, exchange=0.0, per_move=0.0)


def test_a_step_by_hand() -> None:
    load = StepLoad(tokens=10, draws=4, context=1000, pairs=2000)
    # 2.2 MB of weights at 1 GB/s; 2 * (10 * 1e6 + 4 * 1e5) operations take less. KV: 1000 * 800 bytes. Attention:
    # 4 * 100 * 2 layers * 2000 operations.
    expected = 2.2e-3 + 0.8e-3 + 1.6e-6
    assert CostModel(SHAPE, DEVICE, IDEAL).seconds(load) == pytest.approx(expected)
    constants = replace(IDEAL, overhead=0.01, per_sequence=1e-3, weights_share=0.5, kv_share=0.25)
    assert CostModel(SHAPE, DEVICE, constants).seconds(load) == pytest.approx(
        0.01 + 0.004 + 2.2e-3 / 0.5 + 0.8e-3 / 0.25 + 1.6e-6
    )


def test_a_large_step_is_bound_by_compute() -> None:
    load = StepLoad(tokens=5000, draws=0, context=0, pairs=0)
    assert CostModel(SHAPE, DEVICE, IDEAL).seconds(load) == pytest.approx(2 * 5000 * 1e6 / 1e12)


def test_copies_swaps_and_several_devices() -> None:
    cost = CostModel(SHAPE, DEVICE, replace(IDEAL, per_move=1e-5, exchange=1e-4))
    empty = StepLoad(0, 0, 0, 0)
    base = cost.seconds(empty)
    assert cost.seconds(replace(empty, copied_tokens=16)) - base == pytest.approx(2 * 16 * 800 / 1e9)
    # Three blocks, K and V of two layers each: 12 pieces, and 3 * 16 * 800 bytes at 0.1 GB/s.
    assert cost.seconds(replace(empty, swapped_blocks=3)) - base == pytest.approx(12e-5 + 3 * 16 * 800 / 1e8)
    two = CostModel(SHAPE, DEVICE.times(2), replace(IDEAL, exchange=1e-4))
    # Weights take half the time; two exchanges a layer, in each of which a device sends all 10 tokens once.
    assert two.seconds(StepLoad(10, 0, 0, 0)) == pytest.approx(1.1e-3 + 4 * (1e-4 + 10 * 100 * 2 / 1e8))


def test_the_fit_finds_the_constants_again() -> None:
    true = Constants(0.003, 40e-6, 0.7, 0.4, 0.5)
    cost = CostModel(SHAPE, DEVICE, true)
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(60):
        draws = int(rng.integers(1, 200))
        tokens = draws + int(rng.integers(0, 2)) * int(rng.integers(500, 4000))
        load = StepLoad(tokens, draws, int(rng.integers(1, 20_000)), int(rng.integers(20_000, 10**7)))
        steps.append(MeasuredStep(load, cost.seconds(load)))
    fitted = fit_constants(steps, SHAPE, DEVICE)
    for name in ("overhead", "per_sequence", "weights_share", "compute_share", "kv_share"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert fitted.error is not None and fitted.error < 0.01
    noisy = [replace(s, seconds=s.seconds * rng.uniform(0.9, 1.1)) for s in steps]
    error = fit_constants(noisy, SHAPE, DEVICE).error
    assert error is not None and 0.02 < error < 0.08, "noise of 10 % at most is 5 % on average"
    held = fit_constants(steps, SHAPE, DEVICE, fixed={"weights_share": 0.7, "kv_share": 0.5})
    assert (held.weights_share, held.kv_share) == (0.7, 0.5)
    assert held.overhead == pytest.approx(true.overhead, rel=0.02)


def test_the_file_of_steps(tmp_path: Path) -> None:
    steps = tuple(MeasuredStep(StepLoad(i, i, 10 * i, 10 * i), 0.001 * i) for i in range(1, 9))
    calibration = Calibration(DEVICE, SHAPE, steps, "by hand")
    path = tmp_path / "steps.json"
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration
    path.write_text(path.read_text().replace("bandwidth", "width"))
    with pytest.raises(ConfigError, match="device"):
        read_calibration(path)
    with pytest.raises(ConfigError, match="too few"):
        fit_constants(steps[:3], SHAPE, DEVICE)


def test_shapes_have_the_known_sizes() -> None:
    """The paper's: OPT-13B 26 GB and 819,200 bytes of KV a token; 66B 132 GB; 175B 346 GB (of which it has 350)."""
    small = opt_shape("OPT-13B", 40, 5120)
    assert small.weights_bytes == pytest.approx(26e9, rel=0.02) and small.kv_token_bytes == 819_200
    assert opt_shape("OPT-66B", 64, 9216).weights_bytes == pytest.approx(132e9, rel=0.02)
    assert opt_shape("OPT-175B", 96, 12288).weights_bytes == pytest.approx(350e9, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "qk_norm": False}, {"num_kv_heads": 4}]
)
def test_parameters_are_those_of_the_model(changes: dict[str, object]) -> None:
    import jax
    from flax import nnx

    config = tiny_config(**changes)
    leaves = jax.tree.leaves(nnx.state(random_model(config)))
    assert ModelShape.of(config).params == sum(leaf.size for leaf in leaves)


def test_devices_by_name() -> None:
    assert find_device("H200") == DEVICES["h200"]
    assert find_device("4xA100-40GB").total_memory == 4 * DEVICES["a100-40gb"].memory
    with pytest.raises(ConfigError, match=r"no device 'h300'.*h200"):
        find_device("h300")
    with pytest.raises(ConfigError, match="number of devices is 0"):
        find_device("0xh200")
