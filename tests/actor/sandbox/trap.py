"""Things of the host's that a program must not reach, and how it is seen that it did not."""

import dataclasses
import json
import os
import pathlib
import secrets
import socket
import time

from actor.sandbox import languages
from actor.sandbox.pool import Sandbox
from actor.sandbox.program import Case, Outcome
from tests.actor.sandbox.attacks import Attack


class Trap:
    """A file and a folder open to everybody, listeners, a secret in the environment, a mark for processes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.mark = f"mark-{secrets.token_hex(8)}"
        self.secret = f"secret-{secrets.token_hex(8)}"
        self.folder = folder
        for parent in (folder, *folder.parents):
            if parent.stat().st_uid == os.getuid() and parent != pathlib.Path("/tmp"):
                parent.chmod(0o777)
        self.file = folder / "secret"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self._listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self._listeners[1].bind(f"\0{self.mark}")
        self._listeners[1].listen()
        for one in self._listeners:
            one.setblocking(False)

    def spring(self, sandbox: Sandbox, attack: Attack) -> tuple[Outcome, float]:
        """Runs it, with the secret in our environment; its outcome, and its seconds from here."""
        program = languages.program("python", attack.source)
        program = dataclasses.replace(program, argv=(*program.argv, self.mark))
        given = {
            "file": str(self.file),
            "folder": str(self.folder),
            "port": self._listeners[0].getsockname()[1],
            "unix": self.mark,
            "pid": os.getpid(),
        }
        with sandbox.open(program) as box:
            began = time.monotonic()
            outcome = box.run(Case(timeout_s=attack.timeout_s, stdin=json.dumps(given).encode()))
            return outcome, time.monotonic() - began

    def problems(self, outcome: Outcome) -> list[str]:
        """What it reached, or left."""
        found = [f"process {pid} is left" for pid in processes_with(self.mark)]
        if self.secret.encode() in outcome.stdout + outcome.stderr + outcome.returned:
            found.append("the secret came out")
        if os.listdir(self.folder) != ["secret"] or self.file.read_text() != self.secret:
            found.append("the host's folder is changed")
        for one in self._listeners:
            try:
                one.accept()[0].close()
                found.append(f"a listener was reached ({one.family.name})")
            except BlockingIOError:
                pass
        return found

    def close(self) -> None:
        for one in self._listeners:
            one.close()


def processes_with(mark: str) -> list[int]:
    """Processes of this machine that have the mark in their command line."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in pathlib.Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found
