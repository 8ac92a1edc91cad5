"""Commands about existing runs: list, explain, control, clean up, logs."""
