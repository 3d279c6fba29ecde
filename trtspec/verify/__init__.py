"""Verification: which drafts are kept."""
