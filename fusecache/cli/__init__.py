"""The command line: argument parsing, and one module for each group of commands."""
