"""The nouns: values without I/O, clock or await."""
