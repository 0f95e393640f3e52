"""Every decision, as a pure function or state machine: no I/O, no await; time and randomness are arguments."""
