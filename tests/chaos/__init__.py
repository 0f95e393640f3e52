"""Faults at random under a load like a trainer's: a real mount, a seed, and checks of all that must hold.

`python -m tests.chaos --minutes 3 --seed 1` prints a line a minute and a table at the end.
"""
