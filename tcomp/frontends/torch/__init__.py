"""PyTorch → Graph: FX graphs of functional ATen operators, as torch.export and AOTAutograd make them. Needs PyTorch."""

from tcomp.frontends.torch.importer import Imported, array_of, decompositions, import_fx, tensor_of, unsupported_nodes

__all__ = ["Imported", "array_of", "decompositions", "import_fx", "tensor_of", "unsupported_nodes"]
