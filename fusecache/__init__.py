"""Mount an S3 or R2 bucket as a local directory."""

__version__ = "0.4.0.dev0"
