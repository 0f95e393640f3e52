"""Carries out what policy decides: tasks, threads, retries, time."""
