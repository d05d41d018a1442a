"""NumPy reference interpreters, one for each IR."""
