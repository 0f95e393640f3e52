"""Nodes that work together through one bucket, each with a mount of its own."""
