"""From what users call a model to a folder on this machine."""
