"""The executable specification: a dict of bytes beside the real engine, and random programs that compare them."""
