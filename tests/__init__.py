"""Tests of fusecache and loader."""
