"""Probe program of `self_test`, run in a sandbox: tries to escape, to leave something behind, or to exceed its memory.

A JSON object on standard input names the probe ("probe") and holds its arguments.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time

CLONE_NEWUSER = 0x10000000
IO_SETUP = {"x86_64": 206, "aarch64": 0}
ENVIRONMENT = {
    "PATH", "HOME", "PWD", "TMPDIR", "LANG", "LC_CTYPE",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
}  # fmt: skip
OUTSIDE = ("/", "/usr", "/usr/bin", "/etc", "/dev", "/sluice", "/proc/sys/kernel", "/proc")


PLACES = ("/scratch/work", "/tmp", "/dev/shm", "/scratch")


def way_out(given):
    """Tries to escape from the sandbox; prints a JSON list of descriptions of the attempts that succeeded."""
    print(json.dumps([line for probe in (files, network, identity, processes) for line in probe(given)]))


def left_behind(given):
    """Prints the existing files and processes, then leaves some of both."""
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


def memory(given):
    """Exceeds the sandbox's memory with four processes, each of which stays within the limit."""
    for _ in range(3):
        if os.fork() == 0:
            break
    taken = bytearray(given["memory_bytes"] // 3)
    taken[::4096] = b"1" * len(taken[::4096])
    time.sleep(15)


def files(given):
    """Yields accessible host files and writable places outside."""
    if os.path.exists(given["file"]):
        yield "a file of the host can be read"
    for folder in OUTSIDE:
        try:
            with open(os.path.join(folder, "sluice-probe"), "w"):
                yield f"{folder} can be written to"
        except OSError:
            pass
    try:
        with open("/proc/sys/kernel/core_pattern", "w"):
            yield "the kernel's settings can be written"
    except OSError:
        pass


def network(given):
    """Yields reachable listeners of the host."""
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", given["port"])),
        (socket.AF_UNIX, "\0sluice-" + given["unix"]),
    ):
        try:
            with socket.socket(family) as ours:
                ours.settimeout(2.0)
                ours.connect(address)
                yield f"a listener of the host can be reached by {family.name}"
        except OSError:
            pass
    with open("/proc/net/dev") as file:
        names = [line.split(":")[0].strip() for line in file if ":" in line]
    if names != ["lo"]:
        yield f"network devices exist: {', '.join(names)}"


def identity(given):
    """Yields excess privileges, environment variables, and calls that the filter should deny."""
    if os.getuid() == 0 or os.geteuid() == 0 or os.getgroups() not in ([], [os.getgid()]):
        yield f"programs run as uid {os.getuid()} with groups {os.getgroups()}"
    with open("/proc/self/status") as file:
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    for name in ("CapPrm", "CapEff", "CapAmb"):
        if int(status[name], 16):
            yield f"programs have capabilities ({name} {status[name]})"
    if status["NoNewPrivs"] != "1" or status.get("Seccomp") != "2":
        yield "programs may gain privileges, or are not filtered by seccomp"
    if more := set(os.environ) - ENVIRONMENT:
        yield f"the environment has {', '.join(sorted(more))}"
    libc = ctypes.CDLL(None, use_errno=True)
    if succeeds(lambda: libc.ptrace(0, 0, 0, 0)):
        yield "ptrace is open"
    if succeeds(lambda: libc.unshare(CLONE_NEWUSER)):
        yield "namespaces can be created"
    if succeeds(lambda: libc.setpriority(0, 1, 19)):
        yield "the priority of the sandbox's PID 1 can be changed"
    context = ctypes.c_ulong()
    if libc.syscall(IO_SETUP.get(os.uname().machine, -1), 1, ctypes.byref(context)) == 0:
        yield "asynchronous I/O contexts, a machine-wide limited resource, can be allocated"
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
        yield "a program can make the kernel kill other processes instead of itself when memory runs out"
    except OSError:
        pass


def succeeds(call):
    """Returns True if the call returns 0; runs it in a child process, which it may alter."""
    pid = os.fork()
    if pid == 0:
        os._exit(call() != 0)
    return os.waitpid(pid, 0)[1] == 0


def processes(given):
    """Yields visible processes of the host, and missing limits of this process."""
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
    if others or os.getppid() != 1:
        yield f"/proc shows {len(others)} other processes"
    try:
        bytearray(given["address_space_bytes"])
        yield "a process can allocate unlimited memory"
    except MemoryError:
        pass
    children = []
    try:
        while len(children) <= given["num_processes"]:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            children.append(pid)
        yield f"{len(children)} processes could be started, expected at most {given['num_processes']}"
    except OSError:
        # Fewer than allowed: the limit counts processes outside this sandbox.
        if len(children) < given["num_processes"] - 3:
            yield f"only {len(children)} processes of {given['num_processes']} could be started (a kernel before 5.14?)"
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    {"way_out": way_out, "left_behind": left_behind, "memory": memory}[given["probe"]](given)
