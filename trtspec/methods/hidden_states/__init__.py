"""No drafts: the target's hidden states, kept for training."""
