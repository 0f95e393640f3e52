"""Random histories on a mount whose daemon is killed and upgraded, compared with the same history in a plain directory.

`steps.py` draws histories, `pair.py` carries out each step on both sides, `node.py` is the mount, `rounds.py` runs
several histories at once under the same kills, and `reduce.py` shortens one that failed.
"""
