"""Default schedules for CPUs; `default.py` chooses among them by the structure of the loops."""
