"""Multi-token prediction: draft layers of the target's checkpoint, or of one of their own."""
