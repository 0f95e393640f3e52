"""Shared by the command line and the daemon: finding mounts, launching a daemon, talking to its control socket."""
