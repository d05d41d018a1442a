"""PyTorch → Graph: FX graphs of functional ATen operators, as torch.export and AOTAutograd make them. Needs PyTorch."""

from tcomp.frontends.torch.context import TORCH_DTYPES, array_of, contiguous, tensor_of
from tcomp.frontends.torch.decompositions import corrected, decompositions
from tcomp.frontends.torch.importer import SEED, Imported, import_fx, unsupported_nodes
from tcomp.frontends.torch.recurrent import with_scans
from tcomp.frontends.torch.saved import partition

__all__ = [
    "SEED", "TORCH_DTYPES", "Imported", "array_of", "contiguous", "corrected", "decompositions", "import_fx", "partition", "tensor_of",
    "unsupported_nodes", "with_scans",
]  # fmt: skip
