"""The ONNX front end."""

from tcomp.frontends.onnx.importer import NodeRecord, check_model, import_model

__all__ = ["NodeRecord", "check_model", "import_model"]
