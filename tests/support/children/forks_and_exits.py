"""Leave two children behind, one in its group and one that holds the pipe, write their pids to
argv[1] and exit with argv[2]."""

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
