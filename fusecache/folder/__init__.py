"""A plain folder beside a bucket, for machines without FUSE: `fusecache pull`, `push` and `watch`.

Objects become files and files become objects; no mount is involved. What is published goes through the engine.
"""
