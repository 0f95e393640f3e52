"""The command line `python -m loader`."""
