"""One small function, or a row of a table, for each ATen operator, by family."""
