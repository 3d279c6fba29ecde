"""EAGLE3: a draft layer that reads three of the target's residual streams."""
