"""Ways to run a step module: each offers the `Executable` protocol."""
