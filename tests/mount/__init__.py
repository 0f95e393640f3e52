"""The mount as programs meet it: the real command line, the real kernel, a bucket over real sockets."""
