"""Files, the run directory, child processes."""
