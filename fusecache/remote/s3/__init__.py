"""The S3 store, over `remote.http`. botocore finds endpoint, region and keys, and sends no request to the bucket."""
