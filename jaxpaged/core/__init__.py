"""Blocks, block tables and the scheduler: host-side, exact, and free of JAX."""
