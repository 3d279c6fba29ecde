"""Drafts looked up in suffix trees of requests and earlier responses."""
