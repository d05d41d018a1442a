"""What was measured before: the database of tuning records, and what a compilation takes from it."""
