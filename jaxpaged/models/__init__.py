"""Decoder models as Flax nnx modules, with parameters named and shaped as Hugging Face stores them."""
