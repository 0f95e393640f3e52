"""Namespace operations: create, mkdir, symlink, unlink, rmdir, rename."""
