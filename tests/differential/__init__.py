"""Programs x configurations against DDP with the plain optimizer. A failure prints a few lines to paste and run."""
