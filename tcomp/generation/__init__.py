"""Text from language models: sampling, streaming, stop strings, grammars, several texts at a time; on models with state
(`tcomp.State`), and the `tokenizers` package."""

from tcomp.generation.audio import LogMel, read_wave
from tcomp.generation.generator import Generator
from tcomp.generation.grammar import Grammar
from tcomp.generation.request import Completion, Piece, Request
from tcomp.generation.sampling import Sampling
from tcomp.generation.scheduler import Scheduler
from tcomp.generation.sequence_to_sequence import SequenceToSequence

__all__ = [
    "Completion", "Generator", "Grammar", "LogMel", "Piece", "Request", "Sampling", "Scheduler", "SequenceToSequence", "read_wave",
]  # fmt: skip
