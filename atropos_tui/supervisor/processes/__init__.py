"""Local processes: spawn, signals, /proc, logs."""
