"""Files, the run directory, and the life of child processes."""
