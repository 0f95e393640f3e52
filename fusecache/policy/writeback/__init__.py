"""Decisions of write-back: publish order, checkpoint rotation, multipart layout, throttling."""
