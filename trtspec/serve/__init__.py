"""Serving: an OpenAI-compatible front in one process, the engine in another; and model repositories for Triton."""
