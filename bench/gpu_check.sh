#!/usr/bin/env bash
# Checks and measures jaxpaged on the device that is here; needs jax, flax, numpy and transformers, and no network.
#
#     bench/gpu_check.sh [--small] [--output-dir DIR] [--parts numerics kernels engine]
#
# Results go to $OUT, by default bench/results; python3 is the interpreter unless $PYTHON names another. See gpu_check.py.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$root/bench/gpu_check.py" --output-dir "${OUT:-$root/bench/results}" "$@"
