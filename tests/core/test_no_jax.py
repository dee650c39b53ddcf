"""The scheduler can be run, tested and simulated without JAX."""

from __future__ import annotations

import subprocess
import sys


def test_core_imports_no_jax() -> None:
    code = "import sys, jaxpaged.core.scheduler, jaxpaged.capacity; print([m for m in sys.modules if m == 'jax'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
