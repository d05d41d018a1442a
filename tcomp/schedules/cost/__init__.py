"""Analytic models of how long a loop program takes, and of what it must do at least."""
