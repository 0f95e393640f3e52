"""Work on a bucket that need not be mounted: its unfinished uploads, what keys may do in it, removing what is old."""
