"""The engine: requests in, tokens and text out, one step at a time."""
