"""Leaves children behind and exits with argv[2]: one in its group, one holding the pipe. Writes
pids to argv[1]."""

import os
import sys
import time
from pathlib import Path

pids = [os.getpid()]
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    pids.append(pid)
with Path(sys.argv[1]).open("w") as file:
    file.write(" ".join(map(str, pids)) + "\n")
print("last words", flush=True)
os._exit(int(sys.argv[2]))
