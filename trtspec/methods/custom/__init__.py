"""A drafter that the user provides."""
