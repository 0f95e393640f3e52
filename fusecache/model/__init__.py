"""The domain model: plain values and errors, without I/O, clock or await."""
