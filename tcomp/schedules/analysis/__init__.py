"""Analyses of loop programs: dependences, touched regions, access patterns. Nothing here changes a program."""
