"""Puts a learner together for a run folder, and brings it back to where its last checkpoint left it."""

import base64
import contextlib
import dataclasses
import json
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from bridge import codec
from bridge.run_lock import RunLock
from bridge.snapshots.writer import SnapshotWriter
from bridge.store.protocol import LearnerStore
from bridge.store.sample_tickets import SampleTickets
from bridge.store.sqlite import SqliteStore
from bridge.timeline import Timeline
from bridge.types import Group, Ticket
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from learner.checkpoint import CheckpointError, Checkpoints
from learner.data.problems import Problem, write_quarantine
from learner.data.prompts import PromptStream, load_prompts
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.devices.mesh import make_mesh, param_spec
from learner.heart import Heart
from learner.metrics import MetricsWriter
from learner.model.config import Architecture
from learner.model.decoder import Params
from learner.model.hf import io as hf_io
from learner.objective import losses
from learner.publish.pinned import Pinned
from learner.publish.publisher import Publisher
from learner.schedule.batches import micro_batches
from learner.schedule.group_queue import GroupQueue, GroupQueueIterator
from learner.schedule.intake import Intake
from learner.schedule.planner import RoundPlanner, training_sampling
from learner.schedule.waiting_ratio import RoundClock
from learner.update.anchors import Anchors
from learner.update.packing import MicroBatch
from learner.update.state import TrainState
from learner.update.step import Steps, build_steps


@dataclasses.dataclass
class Run:
    """The parts of one learner process."""

    config: Config
    folder: pathlib.Path
    incarnation: int
    model_config: Architecture
    tokenizer: Tokenizer
    held_out: list[Problem]
    store: LearnerStore
    queue: GroupQueueIterator
    planner: RoundPlanner
    prompts: PromptStream
    steps: Steps
    anchors: Anchors
    state: TrainState
    step: int
    """The optimizer step, on the host."""
    last_saved_step: int
    last_evaluated_step: int | None
    """Of the last evaluation whose row is written or which is out; None before the first."""
    publisher: Publisher
    checkpoints: Checkpoints
    evaluation: Pinned
    probe: Pinned
    metrics: MetricsWriter
    timeline: Timeline
    clock: RoundClock
    heart: Heart
    unacknowledged: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    """Groups each save in progress contains, by its step."""
    fenced_actors: set[str] = dataclasses.field(default_factory=set)
    num_ess_stops: int = 0
    lock: RunLock | None = None

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The training stream."""

        def on_issue(num_tickets: int) -> None:
            self.clock.rollout_started(time.time())
            self.timeline.instant("issue", tickets=num_tickets, step=self.step)

        return micro_batches(
            self.config,
            store=self.store,
            queue=self.queue,
            planner=self.planner,
            step=lambda: self.step,
            on_issue=on_issue,
        )

    def round_metrics(self) -> dict[str, float]:
        """What the planner knows of the round that ends."""
        return {"round/is_long": float(self.planner.round_is_long), "round/long_queue": len(self.planner.long_queue)}

    def books(self) -> dict[str, Any]:
        """The host's part of a checkpoint; JSON."""
        return {
            "model": self.model_config.to_hf(),
            "mesh": self.config.mesh.axes,
            "planner": self.planner.get_state(),
            "open_tickets": _pack(self.planner.open_tickets),
            "long_queue": _pack(self.planner.long_queue),
            "prompts": self.prompts.get_state(),
            "queue": self.queue.get_state(),
        }

    def close(self) -> None:
        """Lets go of everything; a save in progress is finished first. The next start publishes anew."""
        with contextlib.ExitStack() as parts:  # each of them, also when one fails
            for part in (self.store, self.timeline, self.metrics, self.checkpoints, self.publisher):
                parts.callback(part.close)
            self.heart.stop()
        if self.lock is not None:
            self.lock.release()


def open_run(config: Config, folder: pathlib.Path, model_folder: pathlib.Path, *, steps: Steps | None = None) -> Run:
    """Builds a learner; resumes if the folder has a checkpoint.

    Args:
      config: the run's.
      folder: the run's.
      model_folder: a Hugging Face folder.
      steps: an earlier run's device functions, compiled already; built here if not given.

    Raises:
      ValueError, FileNotFoundError: the model, the prompts or the mesh are unusable (one line says why).
      CheckpointError: there are checkpoints, and none is intact or fits.
    """
    model_config = Architecture.from_hf(model_folder)
    tokenizer = load_tokenizer(model_folder, vocab_size=model_config.vocab_size)
    prompts, held_out, bad_rows = load_prompts(config, tokenizer)
    if bad_rows and not RunFolder(folder).quarantine.exists():
        write_quarantine(RunFolder(folder).quarantine, config.prompts.path, bad_rows)
    if bad_rows:
        logging.warning("rows set aside count=%d see=%s", len(bad_rows), RunFolder(folder).quarantine)
    mesh = make_mesh(**config.mesh.axes, devices=None)
    if steps is None:
        steps = build_steps(model_config, config, mesh)
    elif not steps.fits(model_config, config):
        raise ValueError("the steps given were built for another model or configuration; let open_run build them")

    lock = RunLock(RunFolder(folder).learner_lock, "learner")
    store: LearnerStore = SqliteStore(RunFolder(folder).store)
    if config.admission.unit == "sample":
        store = SampleTickets(
            store, num_samples=config.rounds.samples_per_group, num_requests=config.rounds.requests_per_group
        )
    incarnation = store.next_incarnation()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    checkpoints = Checkpoints(RunFolder(folder).checkpoints, keep=config.checkpoint.keep)

    def check(books: dict[str, Any]) -> None:
        check_same("model", _shape_fields(Architecture.from_hf(books["model"])), _shape_fields(model_config), folder)
        check_same("mesh", books["mesh"], config.mesh.axes, folder)

    restored = checkpoints.restore_latest(_saved_part(steps.abstract_state()), check=check)

    def load(folder: pathlib.Path, dtype: str) -> Params:
        loaded, params = hf_io.load(
            folder,
            dtype=dtype,
            sharding_fn=lambda path, shape: NamedSharding(mesh, param_spec(path, shape, mesh)),
        )
        check_same_shapes(loaded, model_config, folder)
        return params

    reference = pathlib.Path(config.loss.reference_path or model_folder)
    if restored is None:
        step, books = 0, None
        state = steps.init(load(model_folder, config.model.param_dtype))
    else:
        step, arrays, books = restored
        state = TrainState(**arrays, accumulator=steps.zero_accumulator())
    store.record_restore(incarnation, step)

    planner = RoundPlanner(
        config,
        training_sampling(config, tokenizer.stop_token_ids),
        lambda: next(prompts),
        incarnation=incarnation,
    )
    writer = SnapshotWriter(snapshot_folder(config), run=run_id(folder), tokenizer_hash=tokenizer.fingerprint)
    heart = Heart(store, stop)
    metrics = MetricsWriter(folder, restored_step=step, incarnation=incarnation)
    run = Run(
        config=config,
        folder=folder,
        incarnation=incarnation,
        model_config=model_config,
        tokenizer=tokenizer,
        held_out=held_out,
        store=store,
        queue=None,  # type: ignore[arg-type]  # needs the run itself; set below
        planner=planner,
        prompts=prompts,
        steps=steps,
        anchors=Anchors(
            steps, config, load_reference=lambda: load(reference, config.model.compute_dtype), params=state.params
        ),
        state=state,
        step=step,
        last_saved_step=step,
        last_evaluated_step=metrics.last_step("eval"),
        publisher=Publisher(
            writer,
            model_config.param_names,
            config.publish,
            incarnation=incarnation,
            dtype=config.model.served_dtype,
        ),
        checkpoints=checkpoints,
        evaluation=Pinned("eval", store, while_waiting=heart.check),
        probe=Pinned("probe", store, while_waiting=heart.check),
        metrics=metrics,
        timeline=Timeline(RunFolder(folder).events, "learner"),
        clock=RoundClock(),
        heart=heart,
        fenced_actors=store.fenced_actors(),
        lock=lock,
    )
    run.queue = iter(
        GroupQueue(
            store,
            restores=store.restores(),
            current_step=lambda: run.step,
            max_lag_steps=config.rounds.max_lag_steps,
            is_wanted=lambda group: _is_wanted(run, group),
            min_step=lambda group: planner.min_step(group.ticket_id),
            fenced_actors=run.fenced_actors,
            while_waiting=lambda: _while_waiting(run),
            refuse=Intake(config, store=store, planner=planner, timeline=run.timeline).refuse,
            on_drop=lambda group: planner.depart(group.ticket_id),
            max_ready=config.max_ready_groups,
        )
    )
    if books is not None:
        _restore_books(run, books)
    store.withdraw_pinned()
    store.rewind([t.id for t in planner.open_tickets], next_order=planner.get_state()["num_issued"], step=step)
    heart.start()
    constants = losses.effective_constants(config.loss, temperature=config.sampling.temperature)
    constants["max_response_tokens"] = config.sampling.max_response_tokens
    RunFolder(folder).loss_constants.write_text(json.dumps(constants, indent=2) + "\n")
    logging.info("loss %s", " ".join(f"{name}={value}" for name, value in constants.items()))
    logging.info(
        "learner ready run=%s incarnation=%d step=%d params=%d devices=%d",
        config.run.name,
        incarnation,
        step,
        sum(int(np.prod(x.shape)) for x in jax.tree.leaves(state.params)),
        jax.device_count(),
    )
    return run


def _while_waiting(run: Run) -> None:
    """What the learner sees to while no group comes.

    Raises:
      Stopped: the process was asked to end.
    """
    run.heart.check()
    for ticket_id, reason in run.store.failed().items():
        if run.planner.is_open(ticket_id):
            logging.error("ticket replaced ticket=%s reason=%s", ticket_id, reason)
            run.queue.dropped["failed"] += 1
            run.store.withdraw([ticket_id])
            run.store.put_tickets([run.planner.replace(ticket_id)])


def _is_wanted(run: Run, group: Group) -> bool:
    """Whether a group's ticket is open.

    A restarted learner may meet groups of tickets that it issued after its checkpoint and has yet to issue
    again; prompts and ids are deterministic, so it does so now.
    """
    run.store.put_tickets(run.planner.issue_up_to(group.order, step=run.step))
    return run.planner.is_open(group.ticket_id)


def _restore_books(run: Run, books: dict[str, Any]) -> None:
    tickets = _unpack(books["open_tickets"])
    run.planner.set_state(books["planner"], tickets, _unpack(books["long_queue"]))
    run.prompts.set_state(books["prompts"])
    run.queue.set_state(books["queue"])
    # The checkpoint that contains these groups is committed, so they may go now if they are still there.
    run.queue.acknowledge(books["queue"]["unacknowledged"])
    run.store.put_tickets(tickets)


def _pack(tickets: list[Ticket]) -> list[str]:
    return [base64.b64encode(codec.encode(t)).decode() for t in tickets]


def _unpack(texts: list[str]) -> list[Ticket]:
    return [codec.decode(Ticket, base64.b64decode(t)) for t in texts]


def _saved_part(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of the state; it is saved between updates, where the accumulator is empty."""
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
        "skipped_updates": state.skipped_updates,
    }


def save(run: Run) -> None:
    """Starts a checkpoint of the run as it is between two updates; the one before is finished first."""
    acknowledge_committed(run, run.checkpoints.wait())
    run.unacknowledged[run.step] = run.queue.get_state()["unacknowledged"]
    run.checkpoints.save(run.step, _saved_part(run.state), run.books())
    run.last_saved_step = run.step


def acknowledge_committed(run: Run, step: int | None) -> None:
    """Lets the store forget the groups that a committed checkpoint contains."""
    if step is not None:
        run.queue.acknowledge(run.unacknowledged.pop(step))
        run.timeline.instant("checkpoint", step=step)


def check_same(what: str, saved: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    """Compares what a checkpoint was made for with what is to go on from it.

    Raises:
      CheckpointError: they differ; names the fields.
    """
    differing = sorted(k for k in {*saved, *now} if saved.get(k) != now.get(k))
    if differing:
        fields = "; ".join(f"{field} was {saved.get(field)!r}, is {now.get(field)!r}" for field in differing)
        raise CheckpointError(f"the checkpoint of {folder} is of another {what}: {fields}")


def check_same_shapes(loaded: Architecture, model_config: Architecture, folder: pathlib.Path) -> None:
    """A reference may be another checkpoint of the model, not another model.

    Raises:
      ValueError: its shape differs; names the field.
    """
    wanted = _shape_fields(model_config)
    for name, got in _shape_fields(loaded).items():
        if got != wanted[name]:
            raise ValueError(f"loss.reference_path {folder}: {name} is {got!r}, the model's is {wanted[name]!r}")


def _shape_fields(config: Architecture) -> dict[str, Any]:
    """What makes two models compute alike: not the notes in a config.json."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.compare}
