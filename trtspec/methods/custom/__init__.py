"""A drafter of the user's own."""
