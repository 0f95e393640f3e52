"""Tests without a mount and without a clock."""
