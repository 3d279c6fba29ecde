"""Serving: an OpenAI-compatible front in one process and the engine in another, and model repositories for Triton."""
