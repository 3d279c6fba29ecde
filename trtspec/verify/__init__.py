"""Which drafts are kept."""
