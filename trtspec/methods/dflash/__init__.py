"""DFlash: a block of masks, drafted in one pass over the target's states."""
