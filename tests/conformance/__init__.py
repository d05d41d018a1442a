"""The ONNX backend test suite as conformance test."""
