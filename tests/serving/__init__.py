"""Libraries that load models, unchanged, on a mount: `make test-serving`."""
