"""What processes listen at."""

import contextlib
import ipaddress
import os
import pathlib
import struct


def listening(pids: set[int]) -> set[str]:
    """The addresses at which processes listen for TCP, by the kernel's tables."""
    inodes: set[str] = set()
    for pid in pids:
        fds: list[pathlib.Path] = []
        with contextlib.suppress(OSError):  # it has ended
            fds = list(pathlib.Path(f"/proc/{pid}/fd").iterdir())
        for fd in fds:
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(struct.pack(">I", w) for w in struct.unpack(f"<{len(words) // 4}I", words))
                found.add(str(ipaddress.ip_address(packed)))
    return found
