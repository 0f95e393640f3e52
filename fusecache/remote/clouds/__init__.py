"""Stores that do not speak S3: Google Cloud Storage and Azure Blob, over `remote.http`."""
