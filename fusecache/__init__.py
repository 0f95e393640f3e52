"""Mount an S3 or R2 bucket as a local directory."""

__version__ = "0.1.0"
