"""A grandchild that leaves session, environment and parent once file argv[2] exists. Writes three
pids to argv[1]."""

import os
import sys
import time
from pathlib import Path

SLEEP = "import time; time.sleep(600)"

middle = os.fork()
if middle == 0:
    grandchild = os.fork()
    if grandchild == 0:
        while not Path(sys.argv[2]).exists():
            time.sleep(0.01)
        os.setsid()
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", SLEEP], {})
    Path(sys.argv[1]).write_text(f"{os.getppid()} {os.getpid()} {grandchild}\n")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os._exit(0)
time.sleep(600)
