"""EAGLE3: a layer that reads three of the target's residual streams."""
