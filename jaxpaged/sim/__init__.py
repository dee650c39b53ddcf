"""A simulator of serving: the real scheduler and block manager, a clock, and a model that costs only time.

It needs no JAX and no weights. `simulate` takes `Traffic`, a `Setup` and a `CostModel`, and tells what came of it.
"""

from jaxpaged.sim.calibration import MeasuredStep, fit_constants, read_calibration, write_calibration
from jaxpaged.sim.cost import Constants, CostModel, StepLoad
from jaxpaged.sim.devices import DEVICES, Device, find_device
from jaxpaged.sim.lengths import DATASETS, Dataset, Fixed, Histogram, LogNormal
from jaxpaged.sim.shapes import ModelShape
from jaxpaged.sim.simulator import Event, Setup, Simulation, SimulationResult, simulate
from jaxpaged.sim.systems import SYSTEMS, System
from jaxpaged.sim.traffic import Traffic, bursts, poisson, read_trace

__all__ = [
    "DATASETS",
    "DEVICES",
    "SYSTEMS",
    "Constants",
    "CostModel",
    "Dataset",
    "Device",
    "Event",
    "Fixed",
    "Histogram",
    "LogNormal",
    "MeasuredStep",
    "ModelShape",
    "Setup",
    "Simulation",
    "SimulationResult",
    "StepLoad",
    "System",
    "Traffic",
    "bursts",
    "find_device",
    "fit_constants",
    "poisson",
    "read_calibration",
    "read_trace",
    "simulate",
    "write_calibration",
]
