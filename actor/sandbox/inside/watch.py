"""What a sandbox uses, all processes together: bounds that no kernel keeps without cgroups."""

import os

_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmPTE:", b"VmSwap:")
"""Without the pages of files, which are the host's and shared; with page tables, which sparse memory is made of."""


def memory_bytes(tmpfs):
    """Of all processes but this one and of the files in those folders.

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
    return total + sum(_used_bytes(folder) for folder in tmpfs)


def _used_bytes(folder):
    info = os.statvfs(folder)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def num_files(tmpfs):
    """Files, folders and links in those folders."""
    infos = [os.statvfs(folder) for folder in tmpfs]
    return sum(info.f_files - info.f_ffree for info in infos)
