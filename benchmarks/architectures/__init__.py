"""Small models of many architectures at free sizes: see `python -m benchmarks.architectures --help`."""
