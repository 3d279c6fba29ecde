"""MLP speculators: stages that mix the target's last state with drafted tokens."""
