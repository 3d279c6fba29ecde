"""DSpark: a block of masks whose drafts know the draft before them, cut where the draft doubts itself."""
