"""Translates between the kernel's words and the engine's."""
