"""Actor process. On the learner's machine: `python -m launch.actor --run_dir=FOLDER [--name=actor-0]`.

On another machine:

  python -m launch.actor --store=postgresql://NAME@host/database?sslmode=verify-full --run=NAME --name=...

The actor reads the run's settings from the store. SLUICE_TOKEN_FILE names a file with the run's token, SLUICE_TLS_CA a
file with the trusted certificates, and PGPASSFILE a file with the database password.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from absl import flags, logging

from actor.admission import Admission
from actor.background import RunFinished, watch_run_end
from actor.elastic import ElasticPolicy
from actor.elastic_control import EngineSizeFile, EngineSizeOverride, ResizeRequest, elastic_control_loop
from actor.engine_protocol import EngineSize
from actor.environments.environment_pool import check_environments
from actor.loop import Actor, ActorLimits
from actor.responses import ResponseReader
from actor.rewards.adaptive_timeout import AdaptiveTimeouts
from actor.rewards.verifier_pool import check_cores, check_own
from actor.rewards.verifiers.judge import Judge
from actor.teacher_servers import TeacherServers, check_teacher_servers
from actor.vllm.compiler import check_library
from actor.vllm.engine_setup import tune_gc
from actor.weight_updates import BACKGROUND_TASKS
from actor.weights.client import WeightClient
from bridge.device_turns import EngineTurn
from bridge.liveness import BEAT_S, Activity, Liveness, end_phase, report_phase
from bridge.processes import stop_signals
from bridge.store.open import FinishedRunError
from bridge.store.store_types import StoreLostError
from bridge.text.chat_template import read_chat_template
from bridge.timeline import Timeline
from configs.schema import Config
from launch import cli
from launch.startup.actor_lifecycle import (
    deadline,
    heartbeats,
    release_tickets_of,
    say_refused,
    serve_until_signalled,
    take_devices,
)
from launch.startup.build_actor import build_episodes, build_scorer, check_sandbox, open_judge, verifier_cores
from launch.startup.join_run import JoinedRun, join_folder, join_store
from launch.supervision.hang_detector import end_stopped_processes
from launch.supervision.placement import VISIBLE, bind_to_cores, core_ids, of_one_engine, spread_cores
from launch.supervision.process_tree import die_with_parent

if TYPE_CHECKING:
    from actor.vllm.engine import VllmEngine

_NAME = flags.DEFINE_string("name", "actor-0", "Actor name in the store. Only one process may use it at a time.")
_INSTEAD_OF = flags.DEFINE_string(
    "instead_of", None, "Name of the dead actor that this process replaces. Its leases are released."
)
_STORE = flags.DEFINE_string(
    "store",
    None,
    "Store URL of a run on another machine. Set the password in PGPASSFILE or PGPASSWORD.",
)
_RUN = flags.DEFINE_string("run", None, "With --store: run name.")
_WORK_DIR = flags.DEFINE_string(
    "work_dir",
    None,
    "With --store: folder for this actor's events and limits. By default a folder in the user's cache, removed when "
    "the actor exits without an error.",
)
_SNAPSHOT_DIR = flags.DEFINE_string(
    "snapshot_dir", "/dev/shm", "With --store: shared-memory folder with space for two copies of the weights."
)
_ALLOW_MODULE = flags.DEFINE_multi_string(
    "allow_module",
    [],
    "With --store: custom function (module:function) that the run's config may import on this machine.",
)
_LIMITS = flags.DEFINE_string(
    "limits",
    None,
    "JSON file that overrides the engine limits of the config; default: limits/NAME.json in the run's folder, or in "
    "--work_dir. If it changes while the actor runs, the actor finishes its requests and restarts with the new "
    "limits.",
)
_CPU_CORES = flags.DEFINE_string(
    "cpu_cores",
    None,
    'Cores of this actor and its CPU engine, as in "0-3", with "|" between the processes of tensor parallelism; '
    "default: the config's actor.cpu_cores if it has one engine.",
)
_SHARES_WITH = flags.DEFINE_enum(
    "shares_devices_with",
    None,
    ["learner", "helper"],
    "Trainer that uses this engine's devices in turns with it, set by launch.local; default: the learner with "
    "actor.colocated.",
)
_WAIT_S = flags.DEFINE_float(
    "wait_s", 120.0, "Timeout for the run to be set up, or to be resumed if it is finished, in seconds."
)
_WAIT_FOR_LEARNER = flags.DEFINE_bool("wait_for_learner", False, "Wait for the run without a timeout.")
_LEAVE_S = flags.DEFINE_float(
    "shutdown_grace_s",
    None,
    "Grace period after SIGTERM to hand over tickets, in seconds; default: the config's actor.shutdown_grace_s.",
)

tune_gc()  # here because the engine subprocess also imports this module before it imports vLLM

_NUM_THREADS = 16
"""Threads for store calls. Some calls block, and they must not delay the others."""


def main() -> int:
    """Serves until the actor is asked to stop (0) or fails (one line on stderr, exit code by kind of failure)."""
    die_with_parent()
    liveness = Liveness.of_this_process()
    liveness.start()
    cli.log_to_stderr()
    for number in stop_signals():  # there is no state to clean up while the engine starts
        signal.signal(number, lambda *_: sys.exit(0))
    report_phase("joining the run")
    with contextlib.ExitStack() as parts:
        with cli.start_errors():
            try:
                # Waiting for a learner can take hours, so the actor reports that it is starting.
                joined = _join(lambda: liveness.report(Activity.STARTING))
            except FinishedRunError as e:
                logging.info("actor exits, nothing to serve reason=%s", e)
                return 0
            parts.enter_context(joined.parts)
            joined = dataclasses.replace(joined, config=_bound_to_cores(joined.config))
            check_cores(verifier_cores(joined.config))
            for line in check_own(joined.config.custom_verifiers):
                logging.warning("%s", line)
            check_environments(joined.config.environments_played, joined.config.environments)
            check_sandbox(joined.config)
            check_teacher_servers(joined.config, joined.model.tokenizer)
            check_library()
            if _INSTEAD_OF.value:
                release_tickets_of(joined.store, _INSTEAD_OF.value)
            timeline = Timeline(joined.work.events, _NAME.value)
            parts.callback(timeline.close)
            judge = None
            if joined.config.judge.is_on:
                log = joined.work.log(f"{_NAME.value}-judge")
                beats = functools.partial(liveness.report, Activity.STARTING)
                judge = parts.enter_context(open_judge(joined.config, log, beats=beats))
        stopped = end_stopped_processes(joined.config.supervision.heartbeat_timeout_s)
        limits_file = _limits_file(joined)
        try:
            joined = dataclasses.replace(joined, config=_with_limits(joined.config, limits_file))
            turn = take_devices(joined, _SHARES_WITH.value, lambda: liveness.report(Activity.STARTING))
            began_s = time.monotonic()
            engine = _start_engine(joined, limits_file, liveness, timeline)
            policy = _elastic_policy(joined.config, engine.size, limits_file, restart_s=time.monotonic() - began_s)
            asyncio.run(_serve(joined, engine, timeline, limits_file, liveness, judge, policy, turn))
        except ResizeRequest as e:
            logging.info("actor exits for a resize reason=%s", e)
            return cli.RESIZE
        except RunFinished as e:
            logging.info("actor exits, run is finished reason=%s", e)
        except StoreLostError as e:
            print(f"error: {cli.one_line(e)}; restart the actor when the store is reachable", file=sys.stderr)
            return cli.BUSY
        except Exception as e:
            logging.info("actor failed", exc_info=True)
            print(f"error: {'; '.join([*stopped, str(e)])}", file=sys.stderr)
            return 1
        joined.done()
    return 0


def _join(waits: Callable[[], None]) -> JoinedRun:
    """Joins the run that the command line names; raises ValueError or TimeoutError if the run cannot be served."""
    if flags.FLAGS.config is not None:
        raise ValueError(
            "--config: an actor reads its config from the run; set --run_dir, or --store and --run, instead"
        )
    if (_STORE.value is None) == (flags.FLAGS.run_dir is None):
        raise ValueError(
            "set either --run_dir=FOLDER for a run on this machine, or --store=URL --run=NAME for a remote run"
        )
    if _STORE.value is None:
        for name, value in (("run", _RUN.value), ("work_dir", _WORK_DIR.value), ("allow_module", _ALLOW_MODULE.value)):
            if value:
                raise ValueError(f"--{name} requires --store")
        if cli.given_overrides():
            raise ValueError("--config.* requires --store; the config of a run folder cannot change")
        return join_folder(
            flags.FLAGS.run_dir,
            _NAME.value,
            wait_s=_WAIT_S.value,
            wait_forever=_WAIT_FOR_LEARNER.value,
            on_wait=waits,
        )
    if _RUN.value is None:
        raise ValueError("--store requires --run=NAME (the run's --config.run.name)")
    return join_store(
        _STORE.value,
        _RUN.value,
        _NAME.value,
        given=cli.given_overrides(),
        allowed_modules=_ALLOW_MODULE.value,
        work_dir=_WORK_DIR.value,
        memory=_SNAPSHOT_DIR.value,
        wait_s=_WAIT_S.value,
        wait_forever=_WAIT_FOR_LEARNER.value,
        on_wait=waits,
    )


def _bound_to_cores(config: Config) -> Config:
    """Returns the config of one engine, and binds this process and its children to the engine's cores."""
    config = of_one_engine(config, _CPU_CORES.value)
    if cores := config.actor.cpu_cores:
        try:
            bind_to_cores(core_ids(cores))
        except OSError as e:
            raise ValueError(f"actor.cpu_cores={cores}: this process cannot run on these cores: {e.strerror}") from e
    return config


def _start_engine(
    joined: JoinedRun, limits_file: EngineSizeFile, liveness: Liveness, timeline: Timeline
) -> "VllmEngine":
    """Starts the engine. Raises ResizeRequest if it failed with the overridden limits, which are now rejected."""
    from actor.vllm.engine import VllmEngine  # import vLLM only after the input is validated

    config = joined.config
    with timeline.measure("start engine", max_num_seqs=config.actor.max_num_seqs):
        try:
            with (
                deadline(config.supervision.start_timeout_s, limits_file, liveness),
                heartbeats(joined.store, _NAME.value),
            ):
                model = joined.model
                return VllmEngine.start(model.weights or model.path, config, expected=model.tensors, base=model.base)
        except Exception as e:
            if limits_file.refuse():
                say_refused(limits_file, str(e))
                raise ResizeRequest("using the config's limits") from e
            raise


async def _serve(
    joined: JoinedRun,
    engine: "VllmEngine",
    timeline: Timeline,
    limits_file: EngineSizeFile,
    liveness: Liveness,
    judge: Judge | None,
    policy: ElasticPolicy | None,
    turn: EngineTurn | None,
) -> None:
    config = joined.config
    threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store")
    asyncio.get_running_loop().set_default_executor(threads)
    # These objects must be created inside the event loop that uses them.
    anchors = AdaptiveTimeouts.of_config(joined.store, config.rewards)
    rewards = build_scorer(config, judge, own=joined.config.custom_verifiers, anchors=anchors)
    episodes = build_episodes(config, engine, joined.model.path)
    teachers = TeacherServers(config.loss.teacher_urls)
    weights = WeightClient(joined.source, engine, timeline=timeline)
    end_phase()
    logging.info("actor ready name=%s run=%s model=%s", _NAME.value, joined.run, joined.model.path)
    actor = Actor(
        _NAME.value,
        store=joined.store,
        engine=engine,
        weights=weights,
        rewards=rewards,
        read=ResponseReader(
            joined.model.tokenizer,
            read_chat_template(joined.model.path, config.prompts.template_settings),
            thinking_marks=config.model.thinking_marks,
        ),
        admission=Admission.of(config),
        timeline=timeline,
        limits=ActorLimits(
            lease_s=config.actor.lease_s,
            swap_timeout_s=config.supervision.engine_timeout_s,
            stall_s=config.supervision.engine_timeout_s,
        ),
        drain_before_swap=config.publish.at_publish == "drain",
        max_lag_steps=config.max_lag_steps if config.publish.when == "every" else None,
        episodes=episodes,
        turn=turn,
        teachers=teachers,
    )
    resizing = functools.partial(elastic_control_loop, file=limits_file, policy=policy)
    keep_liveness = functools.partial(report_liveness, liveness=liveness)
    duties = (*BACKGROUND_TASKS, watch_run_end, resizing, keep_liveness)
    if judge is not None:
        duties = (*duties, functools.partial(watch_judge, judge=judge))
    if turn is not None:
        await engine.share_devices(joined.work.path, turn.name)
    shutdown_grace_s = config.actor.shutdown_grace_s if _LEAVE_S.value is None else _LEAVE_S.value
    try:
        await serve_until_signalled(actor, duties, shutdown_grace_s=shutdown_grace_s)
    finally:
        await rewards.close()
        await teachers.close()
        if episodes is not None:
            await episodes.close()
        await engine.close()
        joined.store.close()  # a thread waiting for an unreachable store would otherwise block the exit


async def report_liveness(actor: Actor, *, liveness: Liveness) -> None:
    """Reports liveness from the actor's event loop until cancelled."""
    while True:
        liveness.report(Activity.WORKING if actor.num_groups else Activity.WAITING)
        await asyncio.sleep(BEAT_S)


async def watch_judge(actor: Actor, *, judge: Judge, every_s: float = BEAT_S) -> None:
    """Watches the judge. Raises RuntimeError once it has failed, because no group could be scored any more."""
    while not judge.failure():
        await asyncio.sleep(every_s)
    raise RuntimeError(judge.failure())


def _limits_file(joined: JoinedRun) -> EngineSizeFile:
    config = joined.config
    default = EngineSizeOverride(
        max_num_seqs=config.actor.max_num_seqs, tensor_parallel_size=config.actor.tensor_parallel_size
    )
    return EngineSizeFile(
        pathlib.Path(_LIMITS.value) if _LIMITS.value else joined.work.limits(_NAME.value),
        default=default,
        max_tensor_parallel_size=_largest_size(config),
    )


def _largest_size(config: Config) -> int:
    largest = max(config.actor.max_tensor_parallel_size, config.actor.tensor_parallel_size)
    num_visible = len(visible.split(",")) if (visible := os.environ.get(VISIBLE)) else largest
    return max(config.actor.tensor_parallel_size, min(largest, num_visible))


def _with_limits(config: Config, file: EngineSizeFile) -> Config:
    """Returns the config with the limits file applied; an invalid file is logged and ignored."""
    try:
        limits = file.read()
    except ValueError as e:
        logging.error("limits file ignored, using the config's limits error=%s", e)
        return config
    own = dataclasses.replace(config.actor, cpu_cores="", **dataclasses.asdict(limits))
    cores = config.actor.cpu_cores and spread_cores(config.actor.cpu_cores, own.tensor_parallel_size)
    return dataclasses.replace(config, actor=dataclasses.replace(own, cpu_cores=cores))


def _elastic_policy(
    config: Config, size: EngineSize, file: EngineSizeFile, *, restart_s: float
) -> ElasticPolicy | None:
    """Returns the parallelism planner; None with a fixed size. A restart is taken to cost what this start did."""
    if not config.actor.elastic:
        return None
    largest = _largest_size(config)
    if file.refused_path.exists():  # the last requested size did not start, so do not try it again
        largest = size.tensor_parallel_size
    return ElasticPolicy(
        size=size,
        max_tensor_parallel_size=largest,
        restart_s=restart_s,
        by_round=config.publish.when == "round_end",
    )


if __name__ == "__main__":
    cli.run(main)
