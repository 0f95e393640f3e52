"""Tests of the benchmarks: what they conclude, not what they measure."""
