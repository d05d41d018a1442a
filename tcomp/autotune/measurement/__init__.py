"""Building and timing candidates, in processes that may crash or hang without harm."""
