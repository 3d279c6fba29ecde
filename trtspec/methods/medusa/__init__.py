"""Medusa: heads of residual blocks on the target's last state."""
