"""In the place of an engine where only its process counts: it is up, and ends when it is told
to."""

import time

print("up", flush=True)
time.sleep(3600)
