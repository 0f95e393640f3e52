"""Promises that every implementation of a contract keeps."""
