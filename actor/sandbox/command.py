"""bubblewrap's command line: what of the host a sandbox has, which is read-only, and what it has of its own."""

import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from actor.sandbox import packages
from actor.sandbox.limits import SandboxLimits

CODE = "/sluice"
INSIDE = "actor/sandbox/inside"
HARNESS = f"{CODE}/{INSIDE}/harness.py"
MODULES = ("runner", "case", "clock", "files", "watch", "frames", "harness")
WORK = "/scratch/work"
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OWN = ("/tmp", "/dev", "/proc", "/scratch", CODE, packages.FOLDER)
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/java*")
"""Of /etc: where libraries are, which program has a common name, and what Java does not start without."""
_OLDEST = (3, 9)
"""Python; pidfd_open came with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostView:
    """What sandboxes see of the host besides /usr; read-only, as all of it."""

    python: str = ""
    """Runs programs. Empty: /usr/bin/python3 if it is new enough, else the interpreter that our environment is made of,
    without the packages of the environment."""
    read_only_paths: tuple[str, ...] = ()
    """Folders of more compilers, at the same place inside; a `bin` in them is on the PATH."""
    packages: tuple[str, ...] = ()
    """Installed packages that Python programs may import, with what they require. Compiled ones need the Python that
    they were made for, so programs run on one of this process's version."""

    def __post_init__(self) -> None:
        """Refuses folders that can't be there: a sandbox has its own of those."""
        for path in (*filter(None, [self.python]), *self.read_only_paths):
            if not os.path.isabs(path) or _is_under(os.path.normpath(path), _OWN):
                raise ValueError(f"a path of HostView must be absolute and in none of {', '.join(_OWN)}, got {path!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """Whose rights hold a sandbox together."""

    is_root: bool
    """Real root: no user namespace, and a uid for each sandbox's programs, as RLIMIT_NPROC ignores root's.
    Otherwise: a user namespace for each sandbox, in which the kernel counts apart."""


def mode() -> Mode:
    """How this process starts sandboxes; root in a user namespace, as in rootless containers, is an ordinary user."""
    with open("/proc/self/uid_map") as file:
        first = file.readline().split()
    return Mode(is_root=os.geteuid() == 0 and first == ["0", "0", "4294967295"])


@functools.cache
def interpreter(view: HostView) -> tuple[str, str]:
    """The Python of the sandboxes, and its prefix.

    Raises:
      ValueError: there is none, or it is too old.
    """
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
    """Where bubblewrap is.

    Raises:
      FileNotFoundError: it isn't there.
    """
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
    """Starts a sandbox whose PID 1 is `inside/runner.py`, with its channel as standard input."""
    python, _ = interpreter(view)
    # Before anything else, as nothing inside may lower what it got (/proc is read-only there), nor raise it itself.
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
        # To become the programs' user, and to end what they started.
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
    """Of a program: nothing of ours."""
    return {
        "PATH": _path(view),
        "HOME": WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Threads of libraries for numbers: each has a stack, and the cores are the engine's.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **({"PYTHONPATH": packages.FOLDER} if view.packages else {}),
    }


def folder_shown(view: HostView, path: str) -> str:
    """The folder by which programs can read a file of the host's; empty where they can't."""
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
    # The interpreter's folder comes first where it is not the system's, so that python3 is that one.
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
    mounts += [("--ro-bind", str(path), str(path)) for path in _etc()]
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
    """The folders above what is mounted; bubblewrap would make those that hold a file for root alone."""
    above = {
        str(parent) for *_, path in mounts for parent in pathlib.PurePath(path).parents if not _is_under(path, ["/usr"])
    }
    return [("--perms", "0755", "--dir", folder) for folder in sorted(above - {"/"})]


def _etc() -> Iterator[pathlib.Path]:
    for pattern in _ETC:
        yield from sorted(pathlib.Path("/").glob(pattern.lstrip("/")))


def _hidden(bound: Sequence[str], prefix: str) -> list[str]:
    """What lies under /usr and is nobody's library: source trees, and this project with a run's files beside it."""
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
