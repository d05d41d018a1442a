"""Python functions on arrays, as loop programs."""

from tcomp.frontends.python.program import Program, program
from tcomp.frontends.python.values import assume

__all__ = ["Program", "assume", "program"]
