"""Conversions on a real Ray and a real Spark cluster, of processes on this machine: `make test-clusters`."""
