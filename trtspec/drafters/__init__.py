"""Two-engine speculation: drafters propose from outside the target's graph."""
