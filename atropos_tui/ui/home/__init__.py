"""The list of runs, from which one is opened."""
