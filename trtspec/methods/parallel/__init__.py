"""PARD and P-EAGLE: all drafts in one pass over mask tokens."""
