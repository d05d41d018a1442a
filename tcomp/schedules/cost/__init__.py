"""Analytic cost models of loop programs, and lower bounds of their time (rooflines)."""
