"""Changes of names: create, mkdir, symlink, unlink, rmdir, rename."""
