"""What commands show of running mounts: status, health, top."""
