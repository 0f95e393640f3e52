"""Plain folders beside a bucket: pull, push and watch, as processes that can be killed."""
