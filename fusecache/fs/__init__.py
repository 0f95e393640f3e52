"""The FUSE side: translates between the kernel's requests and the engine's calls."""
