"""The database of tuning records, and the decisions that a compilation takes from it."""
