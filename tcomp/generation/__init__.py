"""Text from language models: sampling, streaming, stop strings; on models with state (`tcomp.State`), and the `tokenizers` package."""

from tcomp.generation.generator import Completion, Generator, Piece
from tcomp.generation.sampling import Sampling

__all__ = ["Completion", "Generator", "Piece", "Sampling"]
