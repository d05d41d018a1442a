"""Host steps: what the runtime itself computes, by NumPy, before and after the machine code of a model: strings and encoded images."""
