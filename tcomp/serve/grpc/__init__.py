"""The same models by gRPC."""
