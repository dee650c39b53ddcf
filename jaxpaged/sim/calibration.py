"""Fits the cost model's constants to measured steps, and keeps these in a file.

The file is JSON: `device` and `model` hold the fields of `Device` and `ModelShape`, `about` says how it was measured,
and `steps` has a list of [tokens, draws, context, pairs, seconds] (see `StepLoad`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ConfigError
from jaxpaged.sim.cost import Constants, CostModel, StepLoad
from jaxpaged.sim.devices import Device
from jaxpaged.sim.shapes import ModelShape

Floats = npt.NDArray[np.float64]

# In the order of the columns of the fit. The shares are fitted as their inverses.
_NAMES = ("overhead", "per_sequence", "weights_share", "compute_share", "kv_share")
_SHARES = _NAMES[2:]


@dataclass(frozen=True)
class MeasuredStep:
    """A step of the real engine.

    Attributes:
        seconds: from its plan to its results on the host.
    """

    load: StepLoad
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Measured steps of one model on one device."""

    device: Device
    model: ModelShape
    steps: tuple[MeasuredStep, ...]
    about: str

    def constants(self, fixed: Mapping[str, float] | None = None) -> Constants:
        """Fitted to the steps; see `fit_constants`."""
        return fit_constants(self.steps, self.model, self.device, about=self.about, fixed=fixed)


def fit_constants(
    steps: Sequence[MeasuredStep],
    shape: ModelShape,
    device: Device,
    *,
    about: str = "",
    fixed: Mapping[str, float] | None = None,
) -> Constants:
    """The constants with which the cost model comes closest to `steps`: least squares of the relative errors.

    Which side of the roofline a step is on depends on the constants; both are improved in turn.

    Args:
        fixed: values of some of the constants that are not to be fitted, by name.

    Raises:
        ConfigError: too few steps, a step without time, or a name that is no constant.
    """
    fixed = dict(fixed or {})
    for name in fixed:
        if name not in _NAMES:
            raise ConfigError(f"{name!r} is no constant that is fitted; these are {', '.join(_NAMES)}")
    free = [i for i, name in enumerate(_NAMES) if name not in fixed]
    if len(steps) < len(free):
        raise ConfigError(f"{len(steps)} measured steps are too few to fit {len(free)} constants; measure more")
    if min(step.seconds for step in steps) <= 0:
        raise ConfigError("a measured step took no time; its seconds must be above 0")
    model = CostModel(shape, device)
    parts = [model.parts(step.load) for step in steps]
    seconds = np.array([step.seconds for step in steps])
    table = np.array(
        [[1, s.load.draws, p.weights, p.linear, p.kv, p.attention] for s, p in zip(steps, parts, strict=True)]
    )
    values = np.array([0.0, 0.0, 1.0, 1.0, 1.0])
    for i, name in enumerate(_NAMES):
        if name in fixed:
            values[i] = 1 / fixed[name] if name in _SHARES else fixed[name]
    best, best_error = values, np.inf
    for _ in range(30):
        columns = _columns(table, values)
        rows = columns[:, free] / seconds[:, None]
        wanted = 1 - (columns @ (values * [name in fixed for name in _NAMES])) / seconds
        values = values.copy()
        values[free] = _non_negative_least_squares(rows, wanted)
        error = float(np.mean(np.abs(_columns(table, values) @ values / seconds - 1)))
        if error >= best_error * (1 - 1e-6):
            break
        best, best_error = values, error
    fitted = {n: 1 / max(v, 1e-9) if n in _SHARES else v for n, v in zip(_NAMES, best.tolist(), strict=True)}
    return replace(Constants(), **fitted, error=best_error, about=about or f"fitted to {len(steps)} steps")


def _columns(table: Floats, values: Floats) -> Floats:
    """[steps, 5] what each constant is multiplied with, on the side of the roofline where `values` put each step."""
    ones, draws, weights, linear, kv, attention = table.T
    reads = weights * values[2] >= linear * values[3]
    return np.stack([ones, draws, weights * reads, linear * ~reads + attention, kv], axis=1)


def _non_negative_least_squares(rows: Floats, wanted: Floats) -> Floats:
    """Minimizes |rows @ x - wanted| over x >= 0, one coordinate after the other."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1
    gram = (rows / scale).T @ (rows / scale)
    target = (rows / scale).T @ wanted
    x = np.zeros(rows.shape[1])
    for _ in range(5000):
        before = x.copy()
        for i in range(len(x)):
            if gram[i, i]:
                x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() < 1e-12:
            break
    return x / scale


def write_calibration(path: Path, calibration: Calibration) -> None:
    steps = [
        [s.load.tokens, s.load.draws, s.load.context, s.load.pairs, round(s.seconds, 7)] for s in calibration.steps
    ]
    lines = ",\n  ".join(json.dumps(step) for step in steps)
    head = {"about": calibration.about, "device": asdict(calibration.device), "model": asdict(calibration.model)}
    text = json.dumps(head, indent=1)
    path.write_text(f'{text[:-2]},\n "steps": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def read_calibration(path: Path) -> Calibration:
    """What `write_calibration` wrote.

    Raises:
        ConfigError: the file is not there or not of this form; names the field.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of measured steps: {error}") from error
    field = "device"
    try:
        device = Device(**content["device"])
        field = "model"
        model = ModelShape(**content["model"])
        field = "steps"
        steps = tuple(
            MeasuredStep(StepLoad(int(tokens), int(draws), int(context), int(pairs)), float(seconds))
            for tokens, draws, context, pairs, seconds in content["steps"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no file of measured steps: {field}: {error}") from error
    return Calibration(device, model, steps, str(content.get("about", path.name)))
