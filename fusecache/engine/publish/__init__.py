"""The publisher: sends queued changes to the bucket, in order, once."""
