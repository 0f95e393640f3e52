"""What the command line and the daemon share: finding mounts, launching a daemon, talking to its control socket."""
