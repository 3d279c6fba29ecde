"""Finding the folder on this machine for a user's name or path of a model."""
