"""State of a run, built from its files and records."""
