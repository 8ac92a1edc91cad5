"""Stand-in for an engine: it is up, and ends on a signal."""

import time

print("up", flush=True)
time.sleep(3600)
