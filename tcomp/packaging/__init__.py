"""From a partitioned graph and compiled kernels to the parts of an artifact: host program, weights, facts of kernels, manifest."""
