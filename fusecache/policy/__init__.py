"""All decisions, as pure functions and state machines: no I/O, no await; time and randomness are arguments."""
