"""The engine's own process, and the front's client for it."""
