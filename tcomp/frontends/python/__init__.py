"""Python functions on arrays, as loop programs."""

from tcomp.frontends.python.program import Program, program

__all__ = ["Program", "program"]
