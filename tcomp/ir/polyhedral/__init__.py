"""The isl bridge: loop programs as integer sets and maps, and back."""
