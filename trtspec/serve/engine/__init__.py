"""The engine's own process, and how the front talks to it."""
