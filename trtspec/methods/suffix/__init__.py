"""Drafts looked up in the request's own text and in a suffix tree of earlier responses."""
