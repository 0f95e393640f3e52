"""A training run that loses nodes mid-epoch and still consumes every global batch as if it never stopped.

`python -m examples.demo` plays it on this machine: one bucket, four caches, trainers of 2, 1 and 4 ranks.
`train.py` is the trainer, and needs nothing of the rest: local paths, `torch` and `loader`.
"""
