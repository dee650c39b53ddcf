"""Paged attention and KV-cache kernels for JAX. Needs only jax."""
