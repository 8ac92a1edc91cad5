"""Ignore TERM, INT and HUP, as does its child in the same group. Writes both pids to argv[1]."""

import os
import signal
import sys
import time
from pathlib import Path

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child:
    with Path(sys.argv[1]).open("w") as file:
        file.write(f"{os.getpid()} {child}\n")
    print("deaf", flush=True)
time.sleep(600)
