"""From names to objects: engines assembled, engine folders built."""
