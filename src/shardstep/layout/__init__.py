"""Which piece of which parameter lies where: pure data and functions, no torch."""
