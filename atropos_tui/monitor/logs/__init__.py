"""Log lines: reading, buffering, searching."""
