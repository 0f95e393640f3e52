"""Local file content: open, read, write, flush, fsync and close of files that this node writes."""
