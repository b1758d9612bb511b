"""Allocates and releases one port for as long as it is told, on standard input; answers how often.

worker.py fastports | worker.py PATH-OF-FLOOR
"""

from __future__ import annotations

import ctypes
import sys
import time

import fastports

FIRST, LAST = 20000, 29999

floor = None
if sys.argv[1] != "fastports":
    floor = ctypes.CDLL(sys.argv[1])
    floor.floor_until.restype = ctypes.c_int64
fastports.allocate().release()  # warm
print("ready", flush=True)
for line in sys.stdin:
    seconds = float(line)
    if floor is not None:
        nanoseconds = ctypes.c_int64(int(seconds * 1e9))
        print(floor.floor_until(nanoseconds, FIRST, LAST, 1), flush=True)
        continue
    calls = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fastports.allocate(1).release()
        calls += 1
    print(calls, flush=True)
