"""The printed form of the IRs, and its parser."""
