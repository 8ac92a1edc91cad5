"""The run's record on disk: journal, lock, seal, liveness of its processes."""
