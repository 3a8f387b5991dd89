"""The command line, and offline conversion."""
