"""Ways to draft: a folder each, and what they share."""
