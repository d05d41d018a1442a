"""Default schedules for GPUs; `default.py` chooses among them by the structure of the loops."""
