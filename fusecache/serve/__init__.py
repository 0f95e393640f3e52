"""`fusecache serve`: a mount's objects over S3's protocol, for programs of this node and for other nodes' daemons."""
