"""PID 1 of a sandbox: receives one program from the host, runs its cases one at a time and reports the results.

It is the sandbox's only trusted process. Programs cannot end it (a namespace's PID 1 gets no unhandled signals), read
its memory or descriptors (it is not dumpable), or write into its channel (closed on exec). When it exits, the kernel
kills the whole namespace. It exits with its channel.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys

from actor.sandbox.inside import case, frames, workspace

_PR_SET_DUMPABLE, _PR_CAP_AMBIENT, _CLEAR_ALL = 4, 47, 4
MAX_BODY_BYTES = 2**30


class SealedError(Exception):
    """The channel was closed."""


def main():
    """Serves the socket on standard input; the argument is a comma-separated list of tools to search."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no effect on PID 1
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    found = [name for name in sys.argv[1].split(",") if _find(name)]
    send(channel, {"pid": os.getpid(), "tools": found, "version": ".".join(map(str, sys.version_info[:3]))})
    with contextlib.suppress(SealedError, ConnectionError):
        serve(channel)


def serve(channel):
    """Receives the program, then its cases."""
    head, blobs = receive(channel)
    uid, limits = head["uid"], head["limits"]
    content = [(name, 0o600, blob) for name, blob in zip(head["names"], blobs)]  # noqa: B905  # Python 3.9 has no strict
    send(channel, {"took": len(content)})
    host = Host(channel)
    while True:
        order, order["blobs"] = receive(channel)
        if "argv" not in order:
            continue  # a late timeout of a finished case
        try:
            ended, *said = case.run(order, content, uid, limits, host)
            if order["keeps"] and ended["ended"] == "exited" and ended["code"] == 0:
                content = _compiled(uid, limits)
        except case.CaseNotRunError as e:
            ended, said = {"ended": "used up", "problem": str(e)[:2000]}, []
        send(channel, ended, said)


class Host:
    """Host connection of a running case."""

    def __init__(self, channel):
        self._channel = channel

    def began(self):
        """Reports that the case's clock starts."""
        send(self._channel, {"began": True})

    def fileno(self):
        """Returns a descriptor that is readable when the host sends a new timeout, or disconnects."""
        return self._channel.fileno()

    def timeout_s(self):
        """Returns the timeout that the host sent. Raises SealedError if the host disconnected."""
        return receive(self._channel)[0]["timeout_s"]


def _compiled(uid, limits):
    """Returns the working directory's files, read by a child process with the program's privileges."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            case.drop_to(uid)
            found = workspace.collect_outputs(limits["disk_bytes"])
            with open(write, "wb") as pipe:
                pipe.write(frames.pack({"of": [(n, m) for n, m, _ in found]}, [c for *_, c in found]))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as pipe:
        sizes = pipe.read(frames.LENGTHS.size)
        rest = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise case.CaseNotRunError("the compiler's output cannot be read")
    length, _ = frames.LENGTHS.unpack(sizes)
    head, blobs = frames.unpack(rest[:length], rest[length:])
    return [(name, mode, blob) for (name, mode), blob in zip(head["of"], blobs)]  # noqa: B905


def receive(channel):
    """Returns a message from the host. Raises SealedError if the host disconnected, or the message is too large."""
    head_bytes, body_bytes = frames.LENGTHS.unpack(_read(channel, frames.LENGTHS.size))
    if head_bytes > frames.MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
        raise SealedError
    text = _read(channel, head_bytes)
    return frames.unpack(text, _read(channel, body_bytes))


def send(channel, head, blobs=()):
    """Sends a message to the host."""
    channel.sendall(frames.pack(head, blobs))


def _read(channel, count):
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise SealedError
        view = view[got:]
    return bytes(data)


def _find(name):
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in os.environ["PATH"].split(":"))
