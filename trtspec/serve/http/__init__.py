"""The OpenAI-compatible front."""
