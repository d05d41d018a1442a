"""tcomp: a compiler for neural networks."""
