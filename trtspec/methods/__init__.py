"""Drafting methods, one folder each, and the code that they share."""
