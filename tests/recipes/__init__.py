"""The trainers of examples/recipes, unchanged, on real mounts: `make test-recipes`."""
