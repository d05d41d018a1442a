"""Autotuning: which of the schedules that a schedule function can make is the fastest here, found by measuring some of them."""
