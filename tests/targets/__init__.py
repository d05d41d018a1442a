"""Models on the platforms that this machine is not: cases of the ONNX backend suite as packages, under an emulator or in Node."""
