"""What the config.json of a checkpoint says."""
