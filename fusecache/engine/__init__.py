"""The engine: carries out what `policy/` decides, with tasks, threads, retries and timers."""
