"""What a sandbox uses, all processes together: bounds that no kernel keeps without cgroups."""

import os

_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmPTE:", b"VmSwap:")
"""Without the pages of files, which are the host's and shared; with page tables, which sparse memory is made of."""


def memory_bytes(tmpfs, socket_bytes):
    """Memory of all processes but this one, of the files in those folders, and `socket_bytes` for each socket.

    Pages that are shared after a fork count in each process: what is found is at least what is used.
    """
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/status", "rb", 0) as file:
                lines = file.read(4096).split(b"\n")
        except OSError:
            continue  # it ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))
    return total + sum(_used_bytes(folder) for folder in tmpfs) + _num_sockets() * socket_bytes


def cpu():
    """CPU seconds of all processes but this one and of their ended children; True if a thread of them is runnable."""
    ticks, is_runnable = 0, False
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            state, times = _stat(f"/proc/{name}")
            ticks += sum(times)
            is_runnable = is_runnable or state == b"R" or _has_runnable(f"/proc/{name}/task")
        except OSError:
            continue  # it ended
    return ticks / _TICKS, is_runnable


def _has_runnable(folder):
    tasks = os.listdir(folder)
    return len(tasks) > 1 and any(_stat(f"{folder}/{task}")[0] == b"R" for task in tasks)


def _stat(folder):
    """State, and clock ticks of the user's, the kernel's, and those of children that were waited for."""
    with open(f"{folder}/stat", "rb", 0) as file:
        fields = file.read(1024).rpartition(b")")[2].split()
    return fields[0], [int(ticks) for ticks in fields[11:15]]


def _num_sockets():
    """UNIX sockets of the network namespace; none other can be made in it."""
    with open("/proc/net/unix", "rb") as file:
        return sum(1 for _ in file) - 1


def _used_bytes(folder):
    info = os.statvfs(folder)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def num_files(tmpfs):
    """Files, folders and links in those folders."""
    infos = [os.statvfs(folder) for folder in tmpfs]
    return sum(info.f_files - info.f_ffree for info in infos)
