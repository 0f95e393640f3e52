"""Programs that show fusecache and the loader at work: read them, run them, copy from them."""
