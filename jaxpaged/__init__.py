"""jaxpaged: LLM serving for JAX with paged KV memory."""
