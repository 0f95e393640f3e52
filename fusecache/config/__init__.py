"""Mount options: their values, defaults, sources and checks."""
