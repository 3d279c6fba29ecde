"""Multi-token prediction: draft layers that come with the target's checkpoint."""
