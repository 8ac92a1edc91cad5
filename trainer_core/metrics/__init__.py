"""What a run leaves behind for people: the telemetry stream, console lines, trackers, the benchmark."""
