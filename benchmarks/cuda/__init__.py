"""Measurements on a GPU, and what needs none: see `python -m benchmarks.cuda --help`."""
