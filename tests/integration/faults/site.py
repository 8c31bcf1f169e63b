"""A campaign's machines and processes: a network, a store, learner hosts and actors, kept alive like a cluster's."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import time
import types
from collections.abc import Generator, Mapping, Sequence

from bridge.liveness import Activity
from configs import overrides
from configs.run_folder import RunFolder, set_up_run
from configs.schema import Config
from launch.startup.tiny_model import cached_tiny_model
from launch.supervision.hang_detector import HangTimeouts
from launch.tools.store_server import certificates
from tests.bench.rig.rig import ONE_THREAD
from tests.integration.faults import keepers
from tests.integration.faults.gates import Gates
from tests.integration.faults.kept import Kept, marked
from tests.integration.faults.progress import Progress
from tests.integration.faults.replay import COMPUTING
from tests.integration.faults.schedule import RUN, SMALL, VLLM
from tests.integration.faults.store_process import StoreProcess
from tests.integration.faults.watched_actor import ENGINE
from tests.integration.network.namespaces import Network, network
from tests.integration.network.places import Places, tmpfs

MIB = 2**20
RUN_MIB = 32
NAME = "faults"
PRESET = "tiny"
FIELDS: Mapping[str, object] = {
    "run.name": NAME,
    "run.num_updates": 10**6,
    "optimizer.schedule": "constant",  # num_updates changes while it runs
    "rounds.groups_per_round": 6,
    "rounds.groups_per_update": 3,
    "rounds.samples_per_group": 4,
    "packing.rows": 2,
    "checkpoint.every_n_steps": 2,
    "evaluation.num_problems": 16,
    "evaluation.every_n_steps": 0,
    "publish.serve": "https",
    "publish.full_every": 3,
    "publish.probe_every_n_publishes": 5,
    "actor.max_num_seqs": 32,
    "actor.lease_s": 4,
    "actor.shutdown_grace_s": 2,
    # A fault every eight seconds hits the same process several times before its next step.
    "actor.max_restarts": 12,
    "supervision.heartbeat_timeout_s": 8,
    "supervision.progress_timeout_s": 60,
    "supervision.engine_timeout_s": 30,
}
COORDINATOR_PORT, SNAPSHOT_PORTS = 7654, "844{process_id}"
NUM_LEARNERS = 2
"""Hosts of a campaign's learner: processes on one machine of the network, where the devices' own connections are."""
END_S = 30.0
"""How long the processes of a learner may take to end after one of them did."""
WAIT_S = 120
"""How long an actor waits for its run before it ends, to be started again."""
START_S = 300.0
"""How long a part of a process's start may take."""
FIRST_HEARTBEAT_S = 120.0
"""How long the first heartbeat of a process may take, on cores that all of them share."""
_LOOK_S = 0.05
_AGAIN_S = 0.5
_GONE_S = 10.0
"""How long what a process started may outlive it."""


class Site:
    """Made by `site`; `keep` must run for dead processes to be started again."""

    def __init__(
        self,
        root: pathlib.Path,
        where: Places,
        disks: Mapping[str, pathlib.Path],
        *,
        num_learners: int,
        has_vllm: bool,
        learner_env: Mapping[str, str],
    ) -> None:
        """Nothing runs yet.

        `disks` are small file systems, by who has them: learner (its checkpoints), store, each actor, and `RUN` (the
        rest of the run's folder). Without `has_vllm` all actors have the small engine.
        """
        self.num_learners, self._learner_env = num_learners, learner_env
        self.root, self.where, self.disks = root, where, disks
        self.mark = f"faults-{os.getpid()}:"
        (root / "logs").mkdir()
        self.config = self._configure()
        self.folder = set_up_run(self.config)
        # Checkpoints go to a disk of their own, which is filled apart from that of the rest of the run's folder.
        (disks["learner"] / "checkpoints").mkdir()
        RunFolder(self.folder).checkpoints.symlink_to(disks["learner"] / "checkpoints")
        self.store = StoreProcess(where, root / "logs" / "store.log")
        self.gates = Gates(root / "gates")
        self.progress = Progress(RunFolder(self.folder).events, self.store)
        self.is_ending = self.is_run_disk_full = False
        self._best_step = 0
        self.num_late_ends = 0
        """Learner processes that outlived another one of theirs by more than `END_S`."""
        self.learners = [self._learner(i) for i in range(num_learners)]
        self.actors = {name: self._actor(name, is_small=name in SMALL or not has_vllm) for name in (*SMALL, VLLM)}
        self._ended_s: dict[str, float] = {}
        """When each dead process, or the first of the learner's, was found (monotonic)."""

    @property
    def processes(self) -> list[Kept]:
        """All that is kept."""
        return [*self.learners, *self.actors.values()]

    def process(self, name: str) -> Kept:
        """By its name."""
        return next(p for p in self.processes if p.role == name)

    def limits_file(self, actor: str) -> pathlib.Path:
        """The file of an actor's engine limits."""
        return RunFolder(self._work(actor)).limits(actor)

    def _work(self, actor: str) -> pathlib.Path:
        return self.root / "work" / actor

    async def start(self) -> None:
        """The store, its recorder, then all others."""
        await self.start_store()
        self.store.record()
        for process in self.processes:
            process.start()

    async def start_store(self) -> None:
        """Starts it, and again where it ends at once; returns when it serves."""
        while not self.store.serves:
            if not self.store.is_alive:
                self.store.start()
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Looks after all processes until it is cancelled."""
        while True:
            self.progress.look()
            self._note_lives()
            for group in (self.learners, *([a] for a in self.actors.values())):
                self._look_after(group)
            await asyncio.sleep(_LOOK_S)

    async def finish(self, *, deadline_s: float) -> None:
        """Makes what is trained by now, and a round more, all that there is to train; TimeoutError if not all end."""
        rounds = self.config.rounds
        per_round = rounds.groups_per_round // rounds.groups_per_update
        goal = (self.progress.step // per_round + 2) * per_round
        self.config = dataclasses.replace(self.config, run=dataclasses.replace(self.config.run, num_updates=goal))
        for learner in self.learners:
            learner.arguments = self._learner_arguments(self.learners.index(learner))
        self.learners[0].request_stop()
        async with asyncio.timeout(deadline_s):
            self.is_ending = True
            while any(p.is_alive or p.returncode != 0 for p in self.processes):
                await asyncio.sleep(_LOOK_S)

    def kill_all(self) -> None:
        """Whatever still runs."""
        for process in self.processes:
            process.kill()
        self.store.stop()

    def _note_lives(self) -> None:
        """What of each process's life is to be known at its end."""
        is_new = self.progress.step > self._best_step
        self._best_step = max(self._best_step, self.progress.step)
        for process in self.processes:
            # What others do says nothing of an actor that is yet to begin.
            process.had_new_step |= is_new and (process in self.learners or process.doing is not Activity.STARTING)
            process.had_full_disk |= self.is_run_disk_full

    def _look_after(self, group: Sequence[Kept]) -> None:
        """Kills who hangs; starts who has ended again, and with a learner's process all of the learner's.

        Not before all that they started is gone, and a moment has passed, or as long as the product's supervisor waits.
        """
        for process in group:
            process.end_if_hung()
        codes = [p.returncode for p in group]
        if all(c is None for c in codes):
            return
        name = group[0].role
        since_s = time.monotonic() - self._ended_s.setdefault(name, time.monotonic())
        # A learner that was killed after it had finished leads the run again, and wants an actor.
        is_over = group is self.learners or since_s < END_S or all(p.returncode == 0 for p in self.learners)
        if self.is_ending and is_over and all(c == 0 for c in codes):
            return
        if alive := [p for p in group if p.is_alive]:
            if since_s > END_S:
                self.num_late_ends += len(alive)
                for process in alive:
                    process.kill()
            return
        left = [pid for process in group for pid in marked(process.mark)]
        pause_s = max(keepers.pause_s([*process.ends, process.end]) for process in group)
        if since_s < max(_GONE_S if left else _AGAIN_S, pause_s):
            return
        group[0].num_orphans += len(left)
        for process in group:
            process.ends.append(process.end)
            process.kill()
            self.gates.forget(process.role)
        for process in group:
            process.start()
        del self._ended_s[name]

    def _configure(self) -> Config:
        fields: dict[str, object] = {
            **FIELDS,
            "run.dir": self.disks[RUN],
            "mesh.fsdp": self.num_learners,
            "store.url": self.where.store_url("learner"),
            "publish.listen": f"{self.where.net['learner'].address}:{SNAPSHOT_PORTS}",
        }
        preset = overrides.load_preset(PRESET)
        fields["model.path"] = cached_tiny_model(preset)
        return overrides.apply(preset, {k: str(v) for k, v in fields.items()})

    def _learner_arguments(self, index: int) -> list[str]:
        config = self.config
        given = {"run.dir", "mesh.fsdp", "run.num_updates", "store.url", "publish.listen", "model.path", *FIELDS}
        values = {field: functools.reduce(getattr, field.split("."), config) for field in sorted(given)}
        arguments = [f"--config={PRESET}", *(f"--config.{k}={v}" for k, v in values.items())]
        if self.num_learners > 1:
            coordinator = f"{self.where.net['learner'].address}:{COORDINATOR_PORT}"
            count = self.num_learners
            arguments += [f"--coordinator={coordinator}", f"--num_processes={count}", f"--process_id={index}"]
        return arguments

    def _learner(self, index: int) -> Kept:
        name = f"learner-{index}"
        jax = COMPUTING | {"JAX_COMPILATION_CACHE_DIR": str(self.root / f"jax-{index}")}
        env = {**self.where.learner_env, **jax, **self._learner_env}
        return self._kept(name, "learner", "watched_learner", self._learner_arguments(index), env)

    def _actor(self, name: str, *, is_small: bool) -> Kept:
        arguments = [
            f"--store={self.where.store_url('actor')}",
            f"--run={NAME}",
            f"--name={name}",
            f"--work_dir={self._work(name)}",
            f"--snapshot_dir={self.disks[name]}",
            f"--wait_s={WAIT_S}",
        ]
        env = {**self.where.actor_env, "SLUICE_CACHE": str(self.root / f"cache-{name}")}
        return self._kept(name, name, "watched_actor", arguments, env | ({ENGINE: "numpy"} if is_small else {}))

    def _kept(self, name: str, host: str, module: str, arguments: list[str], env: Mapping[str, str]) -> Kept:
        limits = self.config.supervision
        return Kept(
            name,
            self.where.net[host],
            f"tests.integration.faults.{module}",
            arguments,
            env={**ONE_THREAD, **env, **self.gates.environment(name)},
            log=self.root / "logs" / f"{name}.log",
            mark=self.mark,
            bounds=HangTimeouts(
                first_heartbeat_timeout_s=FIRST_HEARTBEAT_S,
                heartbeat_timeout_s=limits.heartbeat_timeout_s,
                start_timeout_s=START_S,
                progress_timeout_s=limits.progress_timeout_s,
            ),
        )


@contextlib.contextmanager
def site(
    root: pathlib.Path,
    *,
    num_learners: int,
    has_vllm: bool,
    learner_env: Mapping[str, str] = types.MappingProxyType({}),
    kept_files: pathlib.Path | None = None,
) -> Generator[Site]:
    """The machines of a campaign in a folder that also an unprivileged user may enter; all ends with the block.

    The run's folder is copied to `kept_files`, to be made: its disks end with the block.
    """
    root.mkdir(parents=True)
    root.chmod(0o711)
    hosts = ("learner", "store", *SMALL, VLLM)
    with contextlib.ExitStack() as parts:
        net: Network = parts.enter_context(network(hosts))
        certificates.make(root / "secrets", [host.address for host in net.hosts.values()], days=1)
        sizes = {"learner": 64, "store": 600, **dict.fromkeys((*SMALL, VLLM), 24)}
        disks = {
            name: parts.enter_context(tmpfs(root / "disks" / name, num_bytes=size * MIB))
            for name, size in sizes.items()
        }
        disks[RUN] = parts.enter_context(tmpfs(root / "run", num_bytes=RUN_MIB * MIB))
        (root / "disks").chmod(0o711)
        if kept_files is not None:
            parts.callback(shutil.copytree, root / "run", kept_files)
        where = Places(net, root / "secrets", disks["store"] / "store", root)
        made = Site(root, where, disks, num_learners=num_learners, has_vllm=has_vllm, learner_env=learner_env)
        parts.callback(made.kill_all)
        yield made
