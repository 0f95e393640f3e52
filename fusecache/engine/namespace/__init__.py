"""The namespace: inodes, the tree, lookup, readdir, and the listings behind them."""
