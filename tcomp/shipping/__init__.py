"""Compiled models as something that others install: a library for C, a wheel for Python."""
