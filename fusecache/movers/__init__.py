"""Work of the daemon that helper processes do: fetch bodies from the bucket, and store them in cache files."""
