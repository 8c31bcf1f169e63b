"""The system calls that a program is refused, as the filter that bubblewrap loads.

A list of what is refused and not of what is allowed: interpreters and compilers of ten languages run here. On it are:

- what reaches other processes: ptrace, priorities and cores of the sandbox's PID 1;
- what makes namespaces or mounts, the kernel's largest attack surface for someone without rights;
- memory that no process's size shows: memfd, System V shared memory, queues, TCP's buffers, larger buffers of sockets;
- contexts of asynchronous I/O, of which the whole machine has a fixed number;
- sockets that are no part of a network namespace: AF_VSOCK would reach the hypervisor.

Seccomp is the second wall; namespaces and uids are the first.
"""

import errno
import platform
import struct

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
"""Offsets in struct seccomp_data; little-endian, so an argument's low half comes first."""
_X32 = 0x40000000
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_AF_UNIX, _PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 1, 0, 1
"""AF_UNIX is bound to the network namespace, and its sockets are counted (`inside/watch.py`). AF_INET could reach
nothing but itself, and the kernel keeps megabytes for each of its sockets that nothing in the namespace shows."""

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
# Those that programs try and do without: they are told that the kernel has none.
_ABSENT = """
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, clone3 435 435,
io_setup 206 0, memfd_create 319 279, memfd_secret 447 447,
shmget 29 194, shmat 30 196, msgget 68 186, semget 64 190, mq_open 240 180
"""
# Of the calling process alone (0): PID 1 of the sandbox may have the program's uid.
_OWN = """
prlimit64 302 261, sched_setparam 142 118, sched_setscheduler 144 119, sched_setaffinity 203 122, sched_setattr 314 274
"""
# Of the calling process alone (0), where the first argument says that a process is meant.
_OWN_PRIORITY = ((_PRIO_PROCESS, "setpriority 141 140"), (_IOPRIO_WHO_PROCESS, "ioprio_set 251 30"))
_MACHINES = {"x86_64": (0, 0xC000003E, 56, (41, 53), 54), "aarch64": (1, 0xC00000B7, 220, (198, 199), 208)}
"""Column above, audit architecture, and the numbers of clone, of socket and socketpair, of setsockopt."""


def _numbers(table: str, column: int) -> list[int]:
    return [int(entry.split()[1 + column]) for entry in table.split(",")]


def program(machine: str | None = None) -> bytes:
    """The filter as an array of struct sock_filter, for this machine.

    Raises:
      ValueError: a machine whose system calls are not in the tables.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(
            f"no seccomp filter for {machine}; there are {', '.join(_MACHINES)} (actor/sandbox/seccomp.py)"
        )
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
    for number in _numbers(_OWN, column):
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
