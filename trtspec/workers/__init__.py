"""What runs inside a model's graph."""
