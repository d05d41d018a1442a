"""Primitives of JAX, one family a file: a table of small functions by the name of the primitive."""
