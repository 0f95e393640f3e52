"""The proof that nothing closed is lost, and that the bucket shows no state that the node's tree never had.

Random programs run on the real engine, which is ended at a chosen commit, request or file operation, started again on
what its disk held, and drained. `past.py` says what the tree was at each promise, `rules.py` what the bucket may show.
"""
