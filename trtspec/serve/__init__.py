"""Servers."""
