"""Bubblewrap command line and seccomp filter.

The filter is a deny list, because interpreters and compilers of ten languages run under it. It denies:

* access to other processes: ptrace, priorities and cores of the sandbox's PID 1
* new namespaces and mounts, the kernel's largest attack surface for unprivileged users
* memory outside any process's size: memfd, System V shared memory, queues, TCP buffers, larger socket buffers
* asynchronous I/O contexts, of which the whole machine has a fixed number
* sockets outside network namespaces: AF_VSOCK would reach the hypervisor

Seccomp is the second barrier; namespaces and uids are the first.
"""

import dataclasses
import errno
import functools
import os
import pathlib
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence

from actor.sandbox import packages
from actor.sandbox.program import SandboxLimits

CODE = "/sluice"
INSIDE = "actor/sandbox/inside"
HARNESS = f"{CODE}/{INSIDE}/harness.py"
MODULES = ("runner", "case", "workspace", "frames", "harness")
WORK = "/scratch/work"
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OWN = ("/tmp", "/dev", "/proc", "/scratch", CODE, packages.FOLDER)
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/java*")
"""Paths of /etc that are needed for shared libraries, common program names and Java."""
_OLDEST = (3, 9)
"""Oldest Python, which introduced pidfd_open."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostView:
    """Host paths in addition to /usr that sandboxes see read-only."""

    python: str = ""
    """Interpreter of programs. Empty: /usr/bin/python3 if it is new enough, else the base interpreter of this
    environment, without the environment's packages."""
    read_only_paths: tuple[str, ...] = ()
    """Directories of additional compilers, at the same path inside; their `bin` is on the PATH."""
    packages: tuple[str, ...] = ()
    """Installed packages that Python programs may import, with their dependencies. Compiled packages need the Python
    they were built for, so programs then run on this process's version."""

    def __post_init__(self) -> None:
        """Raises ValueError for paths that a sandbox provides itself."""
        for path in (*filter(None, [self.python]), *self.read_only_paths):
            if not os.path.isabs(path) or _is_under(os.path.normpath(path), _OWN):
                raise ValueError(f"a path of HostView must be absolute and outside {', '.join(_OWN)}, got {path!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """Privileges that isolate a sandbox."""

    is_root: bool
    """True for real root: no user namespace, and a uid per sandbox, because RLIMIT_NPROC ignores root's processes.
    False: a user namespace per sandbox, with its own process count."""


def mode() -> Mode:
    """Returns this process's mode; root in a user namespace (rootless containers) counts as an ordinary user."""
    with open("/proc/self/uid_map") as file:
        first = file.readline().split()
    return Mode(is_root=os.geteuid() == 0 and first == ["0", "0", "4294967295"])


@functools.cache
def interpreter(view: HostView) -> tuple[str, str]:
    """Returns the sandboxes' Python and its prefix. Raises ValueError if no Python was found, or it is too old."""
    tried: list[str] = []
    for candidate in [view.python] if view.python else [SYSTEM_PYTHON, getattr(sys, "_base_executable", "")]:
        path = os.path.realpath(candidate)
        asked = "import sys; print(*sys.version_info[:2], sys.base_prefix)"
        try:
            said = subprocess.run(
                [path, "-I", "-S", "-c", asked], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError) as e:
            tried.append(f"{candidate} ({type(e).__name__})")
            continue
        major, minor, prefix = said.stdout.strip().split(" ", 2)
        version = (int(major), int(minor))
        if version == sys.version_info[:2] or (version >= _OLDEST and not view.packages):
            return path, prefix
        tried.append(f"{candidate} ({major}.{minor})")
    wanted = ".".join(map(str, sys.version_info[:2] if view.packages else _OLDEST))
    raise ValueError(
        f"no Python {wanted} for sandboxes{' with rewards.packages' if view.packages else ' (or newer)'}, tried "
        f"{', '.join(tried)} (apt-get install python3)"
    )


def bwrap() -> str:
    """Returns the path of bubblewrap. Raises FileNotFoundError if it is not installed."""
    found = shutil.which("bwrap")
    if not found:
        raise FileNotFoundError("bubblewrap is not installed")
    return found


def command_line(
    *,
    view: HostView,
    mode: Mode,
    limits: SandboxLimits,
    tools: Sequence[str],
    code_fds: dict[str, int],
    seccomp_fd: int,
    info_fd: int,
) -> list[str]:
    """Returns the command of a sandbox whose PID 1 is `inside/runner.py`, with its channel as standard input."""
    python, _ = interpreter(view)
    # First of all: later nothing inside can lower it (/proc is read-only) or raise it itself.
    argv = [
        "/bin/sh",
        "-c",
        'echo 1000 >/proc/self/oom_score_adj; exec "$@"',
        "sh",
        bwrap(),
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--info-fd",
        str(info_fd),
    ]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--hostname", "sandbox", "--cap-drop", "ALL", "--seccomp", str(seccomp_fd)]
    if mode.is_root:
        # Capabilities to switch to the programs' user, and to kill its processes.
        argv += [word for cap in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL") for word in ("--cap-add", cap)]
    else:
        argv += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    argv += _mounts(view)
    for name, fd in code_fds.items():
        argv += ["--perms", "0555", "--ro-bind-data", str(fd), f"{CODE}/{INSIDE}/{name}.py"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/dev/shm", "/scratch"):
        argv += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", place]
    argv += [
        "--symlink",
        "/scratch/tmp",
        "/tmp",
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/proc",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
    ]
    path = _path(view)
    argv += ["--clearenv", "--setenv", "PATH", path]
    start = f"import sys; sys.path.insert(0, {CODE!r}); from actor.sandbox.inside import runner; runner.main()"
    return [*argv, python, "-I", "-S", "-B", "-c", start, ",".join(sorted(tools))]


def environment(view: HostView) -> dict[str, str]:
    """Returns a program's environment, with nothing from the host's."""
    return {
        "PATH": _path(view),
        "HOME": WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Threads of numeric libraries: each has a stack, and the cores belong to the engine.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **({"PYTHONPATH": packages.FOLDER} if view.packages else {}),
    }


def folder_shown(view: HostView, path: str) -> str:
    """Returns the visible directory that contains a host file; empty if programs cannot read the file."""
    path = os.path.realpath(path)
    _, prefix = interpreter(view)
    bound = ["/usr", *_FOLDERS, *map(os.path.realpath, (prefix, *view.read_only_paths))]
    bound += packages.files_of(view.packages).values()
    if _is_under(path, _hidden(bound, prefix)):
        return ""
    return next((folder for folder in bound if _is_under(path, [folder])), "")


@functools.cache
def _path(view: HostView) -> str:
    python, _ = interpreter(view)
    # A non-system interpreter's directory comes first, so that python3 is that interpreter.
    first = [] if python.startswith("/usr/") else [os.path.dirname(python)]
    more = [f"{path.rstrip('/')}/bin" for path in view.read_only_paths]
    return ":".join([*first, *more, "/usr/local/bin", "/usr/bin", "/bin", "/usr/local/go/bin"])


def _mounts(view: HostView) -> list[str]:
    return [word for mount in _mount_table(view) for word in mount]


@functools.cache
def _mount_table(view: HostView) -> tuple[tuple[str, ...], ...]:
    _, prefix = interpreter(view)
    mounts: list[tuple[str, ...]] = [("--ro-bind", "/usr", "/usr")]
    for folder in _FOLDERS:
        if os.path.islink(folder):
            mounts.append(("--symlink", os.readlink(folder), folder))
        elif os.path.isdir(folder):
            mounts.append(("--ro-bind", folder, folder))
    for pattern in _ETC:
        mounts += [("--ro-bind", str(p), str(p)) for p in sorted(pathlib.Path("/").glob(pattern.lstrip("/")))]
    bound = ["/usr"]
    for path in (prefix, *view.read_only_paths):
        if not _is_under(path, bound):
            mounts.append(("--ro-bind", path, path))
            bound.append(path)
    mounts += [("--tmpfs", path) for path in _hidden(bound, prefix)]
    shown = packages.files_of(view.packages)
    mounts += [("--ro-bind", path, f"{packages.FOLDER}/{name}") for name, path in shown.items()]
    return (*_parents(mounts), *mounts)


def _parents(mounts: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns mounts for the parents of mount points; bubblewrap would make parents of files root-only."""
    above = {
        str(parent) for *_, path in mounts for parent in pathlib.PurePath(path).parents if not _is_under(path, ["/usr"])
    }
    return [("--perms", "0755", "--dir", folder) for folder in sorted(above - {"/"})]


def _hidden(bound: Sequence[str], prefix: str) -> list[str]:
    """Returns directories under /usr that are not libraries: source trees, this project, and a run's files."""
    project = str(pathlib.Path(__file__).resolve().parents[2])
    wanted = ["/usr/src", "/usr/local/src", project, os.path.realpath(os.getcwd())]
    found = []
    for path in wanted:
        needed = (
            _is_under(prefix, [path]) or any(path == b for b in bound) or path in ("/usr/bin", "/usr/lib", "/usr/local")
        )
        if os.path.isdir(path) and _is_under(path, bound) and not needed and "site-packages" not in path:
            found.append(path)
    return sorted(set(found))


def _is_under(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
"""Offsets in struct seccomp_data; little-endian, so an argument's low half comes first."""
_X32 = 0x40000000
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_AF_UNIX, _PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 1, 0, 1
"""AF_UNIX is bound to the network namespace, and its sockets are counted (`inside/case.py`). AF_INET is denied: it
reaches nothing, and the kernel keeps megabytes per socket that the namespace does not show."""


# Name, number on x86_64, number on aarch64.
_REFUSED = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428,
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, fanotify_init 300 262, quotactl 179 60,
add_key 248 217, request_key 249 218, keyctl 250 219, syslog 103 116, acct 163 89, reboot 169 142,
kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106,
swapon 167 224, swapoff 168 225, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
name_to_handle_at 303 264, open_by_handle_at 304 265, migrate_pages 256 238, move_pages 279 239,
process_madvise 440 440, process_mrelease 448 448
"""
# Calls with fallbacks in programs: the filter reports them as missing in the kernel (ENOSYS).
_ABSENT = """
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, clone3 435 435,
io_setup 206 0, memfd_create 319 279, memfd_secret 447 447,
shmget 29 194, shmat 30 196, msgget 68 186, semget 64 190, mq_open 240 180
"""
# Allowed only for the calling process (0), because the sandbox's PID 1 may have the program's uid.
_SECCOMP_OWN = """
prlimit64 302 261, sched_setparam 142 118, sched_setscheduler 144 119, sched_setaffinity 203 122, sched_setattr 314 274
"""
# Allowed only for the calling process (0) if the first argument selects a process.
_OWN_PRIORITY = ((_PRIO_PROCESS, "setpriority 141 140"), (_IOPRIO_WHO_PROCESS, "ioprio_set 251 30"))
_MACHINES = {"x86_64": (0, 0xC000003E, 56, (41, 53), 54), "aarch64": (1, 0xC00000B7, 220, (198, 199), 208)}
"""Table column, audit architecture, and the numbers of clone, of socket and socketpair, and of setsockopt."""


def _numbers(table: str, column: int) -> list[int]:
    return [int(entry.split()[1 + column]) for entry in table.split(",")]


def program(machine: str | None = None) -> bytes:
    """Returns the seccomp filter for a CPU architecture, as an array of struct sock_filter.

    Raises ValueError if the tables lack the machine's system calls.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"no seccomp filter for {machine}; there are {', '.join(_MACHINES)} (actor/sandbox/bwrap.py)")
    column, arch, clone, sockets, setsockopt = _MACHINES[machine]
    code: list[tuple[int, int, int, int]] = []

    def refuse(number: int) -> tuple[int, int, int, int]:
        return (_RETURN, 0, 0, _ERRNO | number)

    def when(number: int, body: list[tuple[int, int, int, int]]) -> None:
        code.extend([(_EQUAL, 0, len(body), number), *body])

    code += [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), refuse(errno.ENOSYS)]
    for number in _numbers(_REFUSED, column):
        when(number, [refuse(errno.EPERM)])
    for number in _numbers(_ABSENT, column):
        when(number, [refuse(errno.ENOSYS)])
    allow = (_RETURN, 0, 0, _ALLOW)
    first, second = (_LOAD, 0, 0, _ARG0), (_LOAD, 0, 0, _ARG1)
    when(clone, [first, (_ANY_BIT, 0, 1, _NAMESPACES), refuse(errno.EPERM), allow])
    for number in _numbers(_SECCOMP_OWN, column):
        when(number, [first, (_EQUAL, 1, 0, 0), refuse(errno.EPERM), allow])
    for which, call in _OWN_PRIORITY:
        for number in _numbers(call, column):
            when(number, [first, (_EQUAL, 0, 2, which), second, (_EQUAL, 1, 0, 0), refuse(errno.EPERM), allow])
    for number in sockets:
        when(number, [first, (_EQUAL, 1, 0, _AF_UNIX), refuse(errno.EAFNOSUPPORT), allow])
    third = (_LOAD, 0, 0, _ARG2)
    buffers = [(_EQUAL, 1, 0, _SO_SNDBUF), (_EQUAL, 0, 1, _SO_SNDBUFFORCE), refuse(errno.EPERM), allow]
    when(setsockopt, [second, (_EQUAL, 0, 4, _SOL_SOCKET), third, *buffers])
    code.append(allow)
    return b"".join(struct.pack("<HBBI", *line) for line in code)
