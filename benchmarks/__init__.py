"""Side-by-side measurements of tcomp and its peers; see README.md. Not installed with tcomp."""
