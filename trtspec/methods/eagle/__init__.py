"""The original EAGLE: a layer that reads the target's last states."""
