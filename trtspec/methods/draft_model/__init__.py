"""A smaller model that drafts, next to the target or in its graph."""
