"""Files of a program: written before each case, collected after its compiler, and removed with all leftovers."""

import os
import stat

SCRATCH = "/scratch"
WORK = "/scratch/work"
TEMPORARY = "/scratch/tmp"
SHARED = "/dev/shm"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def prepare(files):
    """Recreates the writable directories with only `files` (path, mode, content); raises OSError if this fails."""
    for place in (SCRATCH, SHARED):
        clean(place)
    os.mkdir(WORK, 0o700)
    os.mkdir(TEMPORARY, 0o700)
    for name, mode, content in files:
        path = os.path.join(WORK, name)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)


def clean(place):
    """Empties a directory of any depth and permissions, without following links or opening files."""
    top = os.open(place, _OPEN_FOLDER)
    try:
        while names := os.listdir(top):
            for name in names:
                _remove(top, name)
    finally:
        os.close(top)


def _remove(top, name):
    """Removes a file or directory. Subdirectories first move to the top, which flattens deep trees."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, _OPEN_FOLDER, dir_fd=top)
    try:
        for number, inner in enumerate(os.listdir(folder)):
            if stat.S_ISDIR(os.lstat(inner, dir_fd=folder).st_mode):
                os.chmod(inner, 0o700, dir_fd=folder)
                os.rename(inner, _free_name(top, number), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(inner, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _free_name(top, number):
    while True:
        name = f"wiped-{number}"
        try:
            os.lstat(name, dir_fd=top)
        except FileNotFoundError:
            return name
        number += 1_000_003


def collect_outputs(max_bytes):
    """Returns (path, mode, content) of the working directory's files; raises OSError if they exceed `max_bytes`."""
    found, num_bytes = [], 0
    for folder, _, names in os.walk(WORK):
        for name in names:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if not stat.S_ISREG(info.st_mode):
                continue  # links and FIFOs are not compiler output
            num_bytes += info.st_size
            if num_bytes > max_bytes:
                raise OSError(f"compiler output exceeds {max_bytes} bytes")
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                found.append((os.path.relpath(path, WORK), stat.S_IMODE(info.st_mode), file.read()))
    return found
