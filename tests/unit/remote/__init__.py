"""Tests of the bucket room that need no bucket."""
