"""Operators of PyTorch in terms of others, as functions of PyTorch, one family a file; `NotImplemented` is what stays as it is."""
