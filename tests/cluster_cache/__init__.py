"""Nodes that fill from each other, each in a network namespace of its own: `make test-cluster-cache`, as root."""
