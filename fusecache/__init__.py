"""A bucket as a local directory."""

__version__ = "0.1.0"
