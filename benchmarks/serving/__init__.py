"""Servers under load, and what a request costs besides the run of the model."""
