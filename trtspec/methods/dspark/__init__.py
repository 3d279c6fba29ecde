"""DSpark: a block of masks. Each draft depends on the one before, and the block is cut where confidence is low."""
