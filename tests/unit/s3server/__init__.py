"""Tests of the S3 test server."""
