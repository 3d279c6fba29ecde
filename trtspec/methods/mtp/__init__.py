"""Multi-token prediction: draft layers from the target's checkpoint, or from a checkpoint of their own."""
