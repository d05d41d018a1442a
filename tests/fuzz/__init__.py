"""Fuzzers of everything that reads a file or a text: see `__main__.py`."""
