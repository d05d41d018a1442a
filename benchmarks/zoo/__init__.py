"""Many networks by name, with random weights: tcomp, ONNX Runtime and OpenVINO. See `python -m benchmarks.zoo --help`."""
