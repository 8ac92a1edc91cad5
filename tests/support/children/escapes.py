"""Double-fork into a session that ignores TERM; with "clean" the daemon also drops its environment.

argv: pid file, how long the parent stays (seconds), "clean" or "marked".
"""

import os
import sys
import time

DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{sys.argv[2]} {os.getpid()}\\n")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""

leader = os.getpid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        environment = {} if sys.argv[3] == "clean" else dict(os.environ)
        command = [sys.executable, "-I", "-S", "-c", DAEMON, sys.argv[1], str(leader)]
        os.execve(sys.executable, command, environment)
    os._exit(0)
os.wait()
print("escaped", flush=True)
time.sleep(float(sys.argv[2]))
