"""The commands of `tcomp`, one a file."""
