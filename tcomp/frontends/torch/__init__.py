"""PyTorch → Graph: FX graphs of functional ATen operators, as torch.export and AOTAutograd make them. Needs PyTorch."""

from tcomp.frontends.torch.context import array_of, tensor_of
from tcomp.frontends.torch.importer import SEED, Imported, decompositions, import_fx, unsupported_nodes
from tcomp.frontends.torch.recurrent import with_scans

__all__ = ["SEED", "Imported", "array_of", "decompositions", "import_fx", "tensor_of", "unsupported_nodes", "with_scans"]
