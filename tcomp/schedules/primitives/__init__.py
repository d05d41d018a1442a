"""Schedule primitives: pure functions from a kernel to an equivalent kernel.

Loops are addressed by the name of their variable, stages by the name of the buffer they compute; both are unique in a kernel and
survive other steps. A primitive that does not apply raises `ScheduleError`. Examples assume `from tcomp import Schedule, te`.
"""
