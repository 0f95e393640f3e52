"""The daemon of a mount: connects to the bucket, runs the engine and the FUSE session, serves commands."""
