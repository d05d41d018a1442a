"""Operators of the domain `com.microsoft`, as ONNX Runtime's optimiser, its quantisation and the exporters around it write them."""
