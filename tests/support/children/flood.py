"""Print argv[1] numbered lines as fast as possible, then sleep if argv[2] is "stay"."""

import sys
import time

count = int(sys.argv[1])
for start in range(0, count, 1000):
    sys.stdout.write(
        "".join(
            f"line {number:09d} of the flood\n" for number in range(start, min(start + 1000, count))
        )
    )
sys.stdout.flush()
if sys.argv[2] == "stay":
    time.sleep(600)
