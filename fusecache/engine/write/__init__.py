"""Local content: open, read, write, flush and close of files that this node writes."""
