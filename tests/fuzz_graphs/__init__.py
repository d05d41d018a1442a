"""Random ONNX graphs, compiled and run, against onnx's reference implementation and ONNX Runtime."""
