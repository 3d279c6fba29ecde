"""No drafts: stores the target's hidden states for training."""
