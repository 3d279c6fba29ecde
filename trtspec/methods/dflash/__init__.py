"""DFlash: drafts a block of mask tokens in one pass, from the target's hidden states."""
