"""The rig: an engine process on core 0, a learner process on core 1, and sessions one after the other.

A second engine on core 1 serves the sessions that ask for two (`Session.num_engines`). Its core may be the gradient
helper's: then the learner is on core 0 (`learner_core`).
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
from types import TracebackType
from typing import Any

from bridge import timeline
from configs.run_folder import RunFolder, snapshot_folder
from configs.schema import Config
from launch.tools.profile_machine.profile_worker import RpcProcess, wait_for
from learner.metrics.metrics_writer import read_rows
from tests.bench.rig.session import Session

ENGINE_CORE, LEARNER_CORE = 0, 1
ACTOR = "tests.bench.rig.actor_process"
START_S, SESSION_S = 600.0, 600.0
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a session left."""

    rounds: list[dict[str, Any]]
    """Rows of metrics.jsonl, kind "round"."""
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: list[dict[str, Any]]
    """The event log of both processes, in Chrome's trace format."""
    num_passes: int
    num_micro_batches: int
    real_tokens: int
    step_cpu_s: list[float]
    """CPU seconds of the learner's process, all its threads, in the gradients and the optimizer of each update."""
    dropped: dict[str, int]
    running: list[tuple[float, int]]
    """Unix seconds, and the sequences that the engine ran then; of several engines, the first."""
    late_s: float = 0.0
    """How late the actors' process was (`tests.bench.engines.fleet_process`)."""
    machine_speed: float = math.nan
    """MB/s, before the session (`tests.bench.harness.machine`)."""
    num_skipped: int = 0
    """First updates that do not count: their rows are left out."""

    def skip(self, num_updates: int) -> "Result":
        """Returns the session after its first updates, which leave its rows and its span.

        Raises ValueError if no update is left.
        """
        if not 0 <= num_updates < len(self.steps):
            raise ValueError(f"cannot skip {num_updates} of {len(self.steps)} updates")
        skipped = self.num_skipped + num_updates
        return dataclasses.replace(
            self,
            rounds=[row for row in self.rounds if row["step"] > skipped],
            steps=self.steps[num_updates:],
            step_cpu_s=self.step_cpu_s[num_updates:],
            num_skipped=skipped,
        )

    @property
    def span_s(self) -> float:
        """Seconds from the first tickets, or the last update that does not count, to the last optimizer step."""
        applied = sorted(e["ts"] + e["dur"] for e in self.events if e["name"] == "apply")
        issued = min(e["ts"] for e in self.events if e["name"] == "issue")
        return (applied[-1] - (applied[self.num_skipped - 1] if self.num_skipped else issued)) / 1e6

    @property
    def num_samples(self) -> int:
        """Samples trained."""
        return round(sum(row["sequences"] for row in self.steps))

    @property
    def samples_per_s(self) -> float:
        """Samples trained."""
        return self.num_samples / self.span_s

    @property
    def tokens_per_s(self) -> float:
        """Response tokens trained: what rates and speed-ups are of.

        A run ends with groups in progress, and where others overtake them those are the long ones: by samples a run
        that leaves more of them behind would look faster than it is.
        """
        return self.samples_per_s * self.response_tokens

    def mean(self, name: str) -> float:
        """The mean of a metric over the updates, weighted by their trained tokens."""
        known = [(row[name], row["tokens"]) for row in self.steps if row.get(name) is not None]
        return sum(value * tokens for value, tokens in known) / max(sum(tokens for _, tokens in known), 1)

    @property
    def max_lag(self) -> int:
        """Steps, of the oldest token trained."""
        return round(max(row["lag/max"] for row in self.steps))

    @property
    def response_tokens(self) -> float:
        """Mean length of the trained responses."""
        total = sum(row["response/mean_tokens"] * row["sequences"] for row in self.steps)
        return total / sum(row["sequences"] for row in self.steps)


class Rig:
    """The processes; a context manager that ends them."""

    def __init__(
        self,
        root: pathlib.Path,
        config: Config,
        model_folder: pathlib.Path,
        *,
        actor_module: str = ACTOR,
        num_engines: int = 1,
        learner_core: int = LEARNER_CORE,
    ) -> None:
        """Starts the processes and their engines; takes a minute or two.

        Raises ValueError if the machine has one core only, and ChildError if the engine does not start.

        Args:
          config: of the engine: its sections model and actor are every session's, but for actor.max_num_seqs, which may
            be less in a session: the rest of the places stays empty then.
          actor_module: what is run as the engines' processes (`serving.Server`).
          num_engines: engine processes, the first on core 0, the next on core 1.
          learner_core: core of the learner; a helper has the other one.
        """
        if len(os.sched_getaffinity(0)) < 2:
            raise ValueError("the rig wants two cores, one for the engine and one for the learner")
        self.root, self.model_folder = root, model_folder
        root.mkdir(parents=True, exist_ok=True)
        self._num_sessions = 0
        with contextlib.ExitStack() as children:  # each is ended, whatever fails
            self._actors: list[RpcProcess] = []
            for core in range(ENGINE_CORE, ENGINE_CORE + num_engines):
                self._actors.append(RpcProcess(actor_module, [str(core)], root / f"actor-{core}.log"))
                children.callback(self._actors[-1].close)
            self._learner = RpcProcess(
                "tests.bench.rig.learner_process",
                [str(learner_core)],
                root / "learner.log",
                # A helper's process is a new one in each session.
                env=ONE_THREAD | {"JAX_COMPILATION_CACHE_DIR": str(root / "jax")},
            )
            children.callback(self._learner.close)
            for core, actor in enumerate(self._actors, ENGINE_CORE):
                own = dataclasses.replace(
                    config, actor=dataclasses.replace(config.actor, num_engines=1, cpu_cores=str(core))
                )
                request = {"do": "start_engine", "config": Session(config=own).to_json()["config"]}
                self._ask(actor, request | {"model_folder": str(model_folder)}, deadline_s=START_S)
            self._children = children.pop_all()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, session: Session, *, deadline_s: float = SESSION_S) -> Result:
        """Runs a session to its end; its folder is numbered. Raises ChildError if a process failed, or time is up."""
        self._num_sessions += 1
        name = f"bench-{os.getpid()}-{self._num_sessions:03d}"
        run = dataclasses.replace(session.config.run, name=name, dir=str(self.root / name))
        session = dataclasses.replace(session, config=dataclasses.replace(session.config, run=run))
        session.prepare(self.model_folder)
        plain = session.to_json()
        actors = self._actors[: session.num_engines]
        for index, actor in enumerate(actors):
            self._ask(actor, {"do": "begin", "session": plain, "first": index})
        try:
            answer = self._ask(
                self._learner,
                {"do": "train", "session": plain, "model_folder": str(self.model_folder)},
                deadline_s=deadline_s,
            )
            load, *_ = [self._ask(actor, {"do": "end"}) for actor in actors]
        finally:
            shutil.rmtree(snapshot_folder(session.config), ignore_errors=True)
        rows = read_rows(RunFolder(session.folder).metrics)
        return Result(
            rounds=[r for r in rows if r["kind"] == "round"],
            steps=[r for r in rows if r["kind"] == "step"],
            evals=[r for r in rows if r["kind"] == "eval"],
            events=timeline.read(RunFolder(session.folder).events),
            running=[(at_s, running) for at_s, running in load["running"]],
            late_s=load.get("late_s", 0.0),
            **answer,
        )

    def ask_actor(self, do: str, **request: Any) -> dict[str, Any]:
        """Returns the first process's answer; `profile` is after a session, whose weights it uses."""
        return self._ask(self._actors[0], {"do": do} | request)

    def prompts(self, config: Config, count: int) -> list[list[int]]:
        """The tokens of a run's first prompts, in the order of their tickets."""
        return [tokens for tokens, _ in self.problems(config, count)]

    def problems(self, config: Config, count: int) -> list[tuple[list[int], str]]:
        """The same, each with what its answers are judged by."""
        request = {"do": "prompts", "session": Session(config=config).to_json(), "count": count}
        found = self._ask(self._learner, request | {"model_folder": str(self.model_folder)})
        return list(zip(found["prompts"], found["answers"], strict=True))

    def close(self) -> None:
        """Ends all processes."""
        self._children.close()

    def _ask(self, child: RpcProcess, request: dict[str, Any], *, deadline_s: float = SESSION_S) -> dict[str, Any]:
        others = [c for c in (*self._actors, self._learner) if c is not child]
        child.send(request)
        return wait_for(child, *others, deadline_s=deadline_s)
