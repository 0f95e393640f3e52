"""Mount a bucket as a local directory: S3, R2, Google Cloud Storage, Azure Blob."""

__version__ = "0.4.0.dev0"
