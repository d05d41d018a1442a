"""Readers of models: each makes a `Graph`."""
