"""A simulated run's processes on the hosts of a network, and what the test sees of them."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bridge import codec, timeline
from bridge.rollout_types import Group, Version
from bridge.store.protocol import GroupStore
from launch.supervision import process_tree
from tests.integration.network.places import SNAPSHOT_PORT, Places
from tests.integration.network.real import doom
from tests.integration.network.simulated import ledger
from tests.integration.network.simulated.actor import CLOCK_S, TOKEN_S
from tests.integration.network.simulated.engine import DIE_AT, MIXTURE
from tests.integration.network.simulated.setting import Setting
from tests.integration.support.processes import kill, wait_until

T = TypeVar("T")


@dataclasses.dataclass
class Cluster:
    """One run; made by `cluster`."""

    where: Places
    told: Setting
    root: Path
    actor_store_url: str
    learner: subprocess.Popen[str] | None = None
    actors: dict[str, subprocess.Popen[str]] = dataclasses.field(default_factory=dict)
    _num_started: int = 0

    def start_learner(self, host: str = "learner", name: str = "learner") -> None:
        """A life of the learner."""
        self.learner = self._spawn(
            host, "simulated.learner", name, self.told.path / "setting.json", env=self.where.learner_env
        )

    def move_learner(self, host: str) -> subprocess.Popen[str]:
        """Starts another learner on another host, from a copy of what this one has trained; returns this one."""
        old = self.learner
        assert old is not None
        folder = self.root / f"learner-{host}"
        folder.mkdir()
        shutil.copy(self.told.ledger, folder)
        self.told = dataclasses.replace(
            self.told, folder=str(folder), listen=f"{self.where.net[host].address}:{SNAPSHOT_PORT}"
        )
        self.told.write()
        self.start_learner(host, f"learner-{host}")
        return old

    def start_actor(
        self,
        name: str,
        *,
        host: str = "actors",
        die_at: str = "",
        clock_s: float = 0.0,
        shm: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """An actor that joins by the store.

        Args:
          name: the actor's.
          host: where it runs.
          die_at: PHASE:STEP, see `simulated.engine`; with real engines PHASE, see `real.doom`.
          clock_s: how far its clock is ahead.
          shm: a folder that is its shared memory; None for the host's.
          arguments: further ones of its command line.
        """
        if self.told.is_real:
            own = {doom.DIE_AT: die_at, doom.NOTE: str(self.note(name, die_at))}
        else:
            own = {DIE_AT: die_at, CLOCK_S: str(clock_s), TOKEN_S: str(self.told.token_s)}
        own |= {"SLUICE_CACHE": str(self.root / f"cache-{host}")}
        self.actors[name] = self._spawn(
            host,
            "real.actor" if self.told.is_real else "simulated.actor",
            name,
            f"--store={self.actor_store_url}",
            f"--run={self.told.name}",
            f"--name={name}",
            f"--work_dir={self.work_dir(name)}",
            *arguments,
            env={**self.where.actor_env, **own},
            shm=shm,
        )

    def work_dir(self, actor: str) -> Path:
        """Where an actor keeps its events."""
        return self.root / "work" / actor

    def note(self, actor: str, phase: str) -> Path:
        """Where a real actor leaves word before it dies."""
        return self.root / f"note-{actor}-{phase}.json"

    @property
    def groups(self) -> list[Group]:
        """What real engines made and was trained."""
        return [codec.decode(Group, file.read_bytes()) for file in sorted(self.told.kept_groups.glob("t*"))]

    @property
    def ledger(self) -> list[ledger.Entry]:
        """What is trained so far."""
        return ledger.read(self.told.ledger)

    @property
    def num_trained(self) -> int:
        """Groups trained so far; quick, so that it may be asked again and again."""
        return ledger.count(self.told.ledger)

    def versions(self, actor: str) -> list[Version]:
        """The versions that an actor put into service, in their order."""
        events = timeline.read(self.work_dir(actor) / "events")
        return [Version.parse(e["args"]["version"]) for e in events if e["name"] == "pause"]

    def wait_for_groups(self, num_groups: int, *, deadline_s: float = 120.0) -> None:
        """Until so many are trained; fails at once if the learner failed."""

        def there() -> bool:
            assert self.learner is not None
            assert self.learner.poll() in (None, 0), self.logs()
            return self.num_trained >= num_groups

        self.wait(there, f"{num_groups} groups trained", deadline_s=deadline_s)

    def wait(self, condition: Callable[[], bool], what: str, *, deadline_s: float = 120.0) -> None:
        """`wait_until`, with the logs where it fails."""
        try:
            wait_until(condition, what, deadline_s=deadline_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.logs()}") from e

    def wait_for_end(self, *, deadline_s: float = 180.0) -> None:
        """Until the learner has trained all, and every live actor serves its last version."""
        assert self.learner is not None
        learner = self.learner
        self.wait(lambda: learner.poll() is not None, "the learner's end", deadline_s=deadline_s)
        assert learner.returncode == 0, self.logs()

    def check(self) -> None:
        """Exactly once, and never a mixture; nothing of the run is left open in the store."""
        ledger.check_exactly_once(self.ledger, self.told.tickets)
        self.check_no_mixture()
        counts = self.ask_store(lambda store: store.counts())
        assert counts["acknowledged"] == self.told.goal, counts
        assert counts["open"] == counts["claimed"] == counts["done"] == counts["failed"] == 0, counts

    def check_no_mixture(self) -> None:
        """No process found one."""
        for log in self.root.glob("*.log"):
            assert MIXTURE not in log.read_text(errors="replace"), log

    def ask_store(self, ask: Callable[[GroupStore], T]) -> T:
        """What the store answers to the test itself, on the learner's machine, as the learner's role."""
        return self.where.ask_store("learner", self.told.run, ask)

    def is_held_up(self, *, for_s: float = 1.0) -> bool:
        """Whether nothing was trained for so long."""
        return time.time() - self.told.ledger.stat().st_mtime > for_s

    def finish(self) -> None:
        """Makes what is trained by now, and what is on its way, all that there is to train; waits for the end."""
        assert self.learner is not None
        self.learner.send_signal(signal.SIGUSR1)
        self.wait_for_end()

    def kill_learner(self) -> None:
        """SIGKILL."""
        assert self.learner is not None
        kill(self.learner)

    def pids(self) -> list[int]:
        """Of learner and actors, all of which must live, and of what they started (snapshot server, verifiers)."""
        processes = [p for p in (self.learner, *self.actors.values()) if p is not None]
        assert all(p.poll() is None for p in processes), self.logs()
        return sorted({pid for p in processes for pid in (p.pid, *process_tree.descendants(p.pid))})

    def pass_time(self, seconds: float) -> None:
        """Lets the run go on for so long, which is what is tested here."""
        time.sleep(max(0.0, seconds))

    def stop_actor(self, name: str, *, deadline_s: float = 30.0) -> int:
        """SIGTERM; returns its exit code."""
        process = self.actors.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(deadline_s)

    def kill_actor(self, name: str) -> None:
        """SIGKILL."""
        kill(self.actors.pop(name))

    def wait_for_death(self, name: str, *, deadline_s: float = 60.0) -> int:
        """Until an actor has ended by itself; returns its exit code."""
        process = self.actors.pop(name)
        self.wait(lambda: process.poll() is not None, f"the end of {name}", deadline_s=deadline_s)
        return process.returncode

    def wait_for_failure(self, *, deadline_s: float = 60.0) -> list[str]:
        """Until the learner has failed; returns its error lines."""
        assert self.learner is not None
        learner = self.learner
        self.wait(lambda: learner.poll() is not None, "the learner's failure", deadline_s=deadline_s)
        assert learner.returncode == 1, self.logs()
        return [line for line in self.log("learner").splitlines() if line.startswith("error: ")]

    def log(self, name: str) -> str:
        """All that processes of a name have said."""
        return "".join(f.read_text(errors="replace") for f in sorted(self.root.glob(f"*-{name}.log")))

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in files)

    def end(self) -> None:
        """Kills what still runs."""
        for process in (self.learner, *self.actors.values()):
            if process is not None and process.poll() is None:
                kill(process)

    def _spawn(
        self, host: str, module: str, name: str, *arguments: object, env: Mapping[str, str], shm: Path | None = None
    ) -> subprocess.Popen[str]:
        self._num_started += 1
        with open(self.root / f"{self._num_started:02d}-{name}.log", "w") as output:
            return self.where.net[host].spawn(
                f"tests.integration.network.{module}",
                *arguments,
                env=env,
                output=output,
                shm=shm,
            )


@contextlib.contextmanager
def cluster(where: Places, root: Path, name: str, *, actor_store_url: str = "", **told: object) -> Generator[Cluster]:
    """A run of this name, nothing started; what was started ends with the block.

    Args:
      where: hosts, store and secrets.
      root: a folder of the run's own.
      name: the run's.
      actor_store_url: how actors reach the store; empty: straight.
      told: of `Setting`.
    """
    folder = root / "learner"
    folder.mkdir(parents=True)
    fields: dict[str, object] = {
        "folder": str(folder),
        "name": name,
        "store_url": where.store_url("learner"),
        "listen": f"{where.net['learner'].address}:{SNAPSHOT_PORT}",
    }
    setting = Setting(**{**fields, **told})  # pyright: ignore[reportArgumentType]
    setting.write()
    made = Cluster(where, setting, root, actor_store_url or where.store_url("actor"))
    try:
        yield made
    finally:
        made.end()


def memory_bytes(pid: int) -> int:
    """A process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
