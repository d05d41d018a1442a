"""What is true of a loop program: dependences, touched regions, access patterns. Nothing here changes a program."""
