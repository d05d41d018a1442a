"""One small function per ONNX operator, a family a file."""
