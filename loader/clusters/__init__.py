"""Conversion on a cluster that is already there: Ray or Spark."""
