"""Takes more memory than a sandbox may have, in four processes; each may have its part."""

import os
import sys
import time

if __name__ == "__main__":
    part = int(sys.stdin.read()) // 3
    for _ in range(3):
        if os.fork() == 0:
            break
    taken = bytearray(part)
    taken[::4096] = b"1" * len(taken[::4096])
    time.sleep(15)
