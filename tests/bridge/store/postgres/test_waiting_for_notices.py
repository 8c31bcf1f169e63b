import fcntl
import os

from bridge.store.postgres.postgres_database import _wait_readable


def test_descriptor_above_those_of_select_is_waited_for():
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 1024)
    try:
        _wait_readable(high, timeout_s=0.0)
        os.write(write, b"x")
        _wait_readable(high)
    finally:
        for fd in (read, write, high):
            os.close(fd)
