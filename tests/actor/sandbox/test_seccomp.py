"""The filter, executed by an interpreter of its instructions that was written apart."""

import errno
import pathlib
import re
import struct

import pytest

from actor.sandbox import bwrap

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+) (\d+)"),
    "aarch64": ("/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+) (\d+)"),
}


def verdict(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the kernel would return for that call (linux/filter.h, linux/seccomp.h)."""
    six = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *six)
    code = list(struct.iter_unpack("<HBBI", bwrap.program(machine)))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x06:
            return k
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[operation]
            at += if_true if holds else if_false


def refused(number: int) -> int:
    return ERRNO | number


@pytest.mark.parametrize("machine", ARCH)
def test_numbers_are_those_of_the_kernels_headers(machine):
    path, pattern = HEADERS[machine]
    if not pathlib.Path(path).exists():
        pytest.skip(f"no {path} (Debian: linux-libc-dev)")
    real = {name: int(number) for name, number in re.findall(pattern, pathlib.Path(path).read_text())}
    column = list(ARCH).index(machine)
    compared = 0
    priorities = [call for _, call in bwrap._OWN_PRIORITY]
    for entry in ",".join([bwrap._REFUSED, bwrap._ABSENT, bwrap._SECCOMP_OWN, *priorities]).split(","):
        name, *numbers = entry.split()
        if name in real:  # headers may be older than a call
            assert int(numbers[column]) == real[name], name
            compared += 1
    assert compared > 40
    _, _, clone, sockets, setsockopt = bwrap._MACHINES[machine]
    assert (clone, *sockets, setsockopt) == tuple(real[n] for n in ("clone", "socket", "socketpair", "setsockopt"))


@pytest.mark.parametrize(("machine", "ptrace", "memfd", "read"), [("x86_64", 101, 319, 0), ("aarch64", 117, 279, 63)])
def test_calls_are_refused_absent_or_allowed(machine, ptrace, memfd, read):
    assert verdict(machine, ptrace) == refused(errno.EPERM)
    assert verdict(machine, memfd) == refused(errno.ENOSYS)
    assert verdict(machine, 435) == refused(errno.ENOSYS)  # clone3: its flags lie where no filter can look
    assert verdict(machine, read) == ALLOW


@pytest.mark.parametrize(
    ("machine", "clone", "prlimit", "socket"), [("x86_64", 56, 302, 41), ("aarch64", 220, 261, 198)]
)
def test_calls_are_judged_by_their_first_argument(machine, clone, prlimit, socket):
    thread, user_namespace = 0x003D0F00, 0x10000000
    assert verdict(machine, clone, thread) == ALLOW
    assert verdict(machine, clone, thread | user_namespace) == refused(errno.EPERM)
    assert (verdict(machine, prlimit, 0), verdict(machine, prlimit, 1)) == (ALLOW, refused(errno.EPERM))
    refused_families = [2, 10, 40, 16, 17, 38]  # IPv4, IPv6, VSOCK, netlink, packets, cryptography
    assert verdict(machine, socket, 1) == ALLOW
    assert {verdict(machine, socket, family) for family in refused_families} == {refused(errno.EAFNOSUPPORT)}


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize(
    ("name", "of_itself", "of_another"),
    [
        ("sched_setscheduler", (0,), (1,)),
        ("sched_setaffinity", (0,), (1,)),
        ("sched_setattr", (0,), (1,)),
        ("prlimit64", (0,), (1,)),
        ("setpriority", (0, 0), (0, 1)),
        ("setpriority", (0, 0), (1, 0)),  # a group of processes
        ("setpriority", (0, 0), (2, 0)),  # all of its user's
        ("ioprio_set", (1, 0), (1, 1)),
        ("ioprio_set", (1, 0), (3, 0)),
        ("setsockopt", (5, 1, 2), (5, 1, 7)),  # SO_REUSEADDR, SO_SNDBUF
        ("setsockopt", (5, 6, 7), (5, 1, 32)),  # not of the socket itself; SO_SNDBUFFORCE
    ],
)
def test_calls_on_the_caller_are_allowed_and_on_others_are_not(machine, name, of_itself, of_another):
    numbers = {
        "sched_setscheduler": (144, 119),
        "sched_setaffinity": (203, 122),
        "sched_setattr": (314, 274),
        "prlimit64": (302, 261),
        "setpriority": (141, 140),
        "ioprio_set": (251, 30),
        "setsockopt": (54, 208),
    }
    number = numbers[name][list(ARCH).index(machine)]
    assert verdict(machine, number, *of_itself) == ALLOW
    assert verdict(machine, number, *of_another) == refused(errno.EPERM)


def test_calls_of_another_architecture_end_the_program():
    assert verdict("x86_64", 0, arch=0x40000003) == KILL
    assert verdict("x86_64", 0x40000000 | 101) == refused(errno.ENOSYS)


def test_machine_that_is_not_in_the_tables_is_refused():
    with pytest.raises(ValueError, match="no seccomp filter for riscv64; there are x86_64, aarch64"):
        bwrap.program("riscv64")
