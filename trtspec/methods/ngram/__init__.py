"""Drafts looked up in the request's own tokens, or in a pool of earlier matches."""
