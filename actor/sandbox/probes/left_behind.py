"""Prints which files and processes there are, then leaves some of both."""

import os
import time

PLACES = ("/scratch/work", "/tmp", "/dev/shm", "/scratch")

if __name__ == "__main__":
    pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    print(pids, [sorted(os.listdir(place)) for place in PLACES], flush=True)
    for place in PLACES:
        os.makedirs(os.path.join(place, "left", "deep"))
        os.chmod(os.path.join(place, "left", "deep"), 0)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
