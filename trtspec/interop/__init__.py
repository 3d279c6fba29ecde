"""Speculation in the words of other servers."""
