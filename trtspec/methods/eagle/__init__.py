"""The original EAGLE: a draft layer that reads the target's last states."""
