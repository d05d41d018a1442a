"""Readers of models, each of which makes a `Graph`, and of Python functions, which become loop programs."""
