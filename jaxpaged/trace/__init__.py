"""Recording what a scheduler does to its memory, and showing it: no JAX in here.

A `Recorder` watches a `Scheduler`, that of an engine or a bare one, and hands on records; `TraceFile` keeps them,
`open_trace` reads them back, and `Replay` rebuilds the state at each of them. `jaxpaged.trace.html` and
`jaxpaged.trace.png` draw it.
"""

from jaxpaged.trace.file import TraceFile, recording
from jaxpaged.trace.format import Header, Record, TraceError, open_trace
from jaxpaged.trace.recorder import Recorder
from jaxpaged.trace.replay import Replay

__all__ = ["Header", "Record", "Recorder", "Replay", "TraceError", "TraceFile", "open_trace", "recording"]
