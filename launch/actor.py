"""An actor: `python -m launch.actor --run_dir=FOLDER [--name=actor-0]`."""

import asyncio
import dataclasses
import functools
import pathlib
import signal
import sys
import time
from collections.abc import Iterable

from absl import flags, logging

from actor.admission import Admission
from actor.duties import STANDARD_DUTIES
from actor.duties.resizing import ResizeRequest, follow_limits
from actor.engine.elastic import Bounds, ElasticShare
from actor.engine.limits import EngineLimits, LimitsFile
from actor.engine.protocol import EngineSize
from actor.loop import Actor, Duty, Limits
from actor.verifiers.pool import VerifierPool, check_own
from actor.weights.client import WeightClient
from actor.weights.local_copy import LocalCopy
from actor.weights.model_folder import read_model_folder
from actor.weights.source import LocalSource
from bridge.pulse import BEAT_S, Doing, Pulse
from bridge.store.sqlite import SqliteStore
from bridge.timeline import Timeline
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch import command_line
from launch.engine_start import deadline, heartbeats, say_refused
from launch.lifeline import die_with_parent
from launch.stopped import end_stopped_processes

_NAME = flags.DEFINE_string("name", "actor-0", "This actor's name in the store; one process may use it at a time.")
_LIMITS = flags.DEFINE_string(
    "limits",
    None,
    "JSON file with the engine's limits, where they differ from the config's; default: limits/NAME.json in the run "
    "folder. Written while the actor runs, it makes the actor finish what it has and start again with them.",
)
_WAIT_S = flags.DEFINE_float("wait_s", 120.0, "How long to wait for the run folder to be set up.")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RUN_FOLDER_POLL_S = 0.1
_LATE_SIGNAL_S = 0.5


def main() -> int:
    """Serves until it is told to stop (0) or fails (1, with one line that says why)."""
    die_with_parent()
    pulse = Pulse.of_this_process()
    pulse.start()
    command_line.log_to_stderr()
    for number in _SIGNALS:  # while the engine is being built there is nothing to bring in order
        signal.signal(number, lambda *_: sys.exit(0))
    with command_line.usage_errors():
        prepared = _wait_for_run()
        config, folder = prepared.config, prepared.folder
        check_own(config.prompts.verifier)
        model = read_model_folder(prepared.model_folder, dtype=config.model.served_dtype)
        snapshots = snapshot_folder(config)
        copy = LocalCopy(snapshots, _NAME.value)
        store = SqliteStore(RunFolder(folder).store, busy_timeout_s=config.supervision.lock_wait_s)
        timeline = Timeline(RunFolder(folder).events, _NAME.value)
    stopped = end_stopped_processes(config.supervision.heartbeat_s)
    limits_file = _limits_file(config, folder)
    try:
        from actor.vllm.engine import VllmEngine  # vLLM is loaded only once the input is known to be good

        config = _with_limits(config, limits_file)
        with timeline.measure("start engine", max_num_seqs=config.actor.max_num_seqs):
            try:
                with deadline(config.actor.start_timeout_s, limits_file, pulse), heartbeats(store, _NAME.value):
                    engine = VllmEngine.start(model.path, config, expected=model.tensors)
            except Exception as e:
                if limits_file.refuse():
                    say_refused(limits_file, str(e))
                    return command_line.RESIZE
                raise
        weights = WeightClient(
            LocalSource(
                snapshots,
                copy.file,
                run=run_id(folder),
                tokenizer_hash=model.tokenizer_hash,
                expected=model.tensors,
            ),
            engine,
            timeline=timeline,
        )
        logging.info("actor ready name=%s model=%s", _NAME.value, model.path)

        async def serve() -> None:
            # Made inside the loop that uses them.
            verifiers = VerifierPool(
                num_workers=config.actor.verifier_workers,
                timeout_s=config.actor.verifier_timeout_s,
                retries=config.actor.verifier_retries,
                truncated=config.prompts.truncated,
            )
            actor = Actor(
                _NAME.value,
                store=store,
                engine=engine,
                weights=weights,
                verifiers=verifiers,
                decode=model.decode,
                admission=Admission.of(config),
                timeline=timeline,
                limits=Limits(
                    lease_s=config.actor.lease_s,
                    max_attempts=config.actor.max_attempts,
                    swap_s=config.supervision.swap_s,
                    stall_s=config.supervision.engine_s,
                ),
                drains=config.publish.at_publish == "drain",
                lag_bound=config.lag_bound if config.publish.when == "every" else None,
            )
            share = _elastic_share(config, engine.size, limits_file) if config.actor.elastic else None
            resizing = functools.partial(follow_limits, file=limits_file, share=share)
            keep_pulse = functools.partial(_keep_pulse, pulse=pulse)
            try:
                await _run_until_stopped(actor, (*STANDARD_DUTIES, resizing, keep_pulse))
            finally:
                await verifiers.close()
                await engine.close()

        asyncio.run(serve())
        weights.close()
    except ResizeRequest as e:
        logging.info("actor ends to be resized: %s", e)
        return command_line.RESIZE
    except Exception as e:
        logging.info("actor failed", exc_info=True)
        print(f"error: {'; '.join([*stopped, str(e)])}", file=sys.stderr)
        return 1
    finally:
        timeline.close()
        store.close()
        copy.close()
    return 0


async def _keep_pulse(actor: Actor, *, pulse: Pulse) -> None:
    """Says that the actor's loop turns."""
    while True:
        pulse.work(Doing.WORKING if actor.num_groups else Doing.WAITING)
        await asyncio.sleep(BEAT_S)


def _limits_file(config: Config, folder: pathlib.Path) -> LimitsFile:
    default = EngineLimits(
        max_num_seqs=config.actor.max_num_seqs, tensor_parallel_size=config.actor.tensor_parallel_size
    )
    return LimitsFile(
        pathlib.Path(_LIMITS.value) if _LIMITS.value else RunFolder(folder).limits(_NAME.value),
        default=default,
        max_tensor_parallel_size=max(config.actor.max_tensor_parallel_size, default.tensor_parallel_size),
    )


def _with_limits(config: Config, file: LimitsFile) -> Config:
    """The config with the limits of the file; one that can't be used is no reason not to serve."""
    try:
        limits = file.read()
    except ValueError as e:
        logging.error("limits ignored, the config's are used: %s", e)
        return config
    return dataclasses.replace(config, actor=dataclasses.replace(config.actor, **dataclasses.asdict(limits)))


def _elastic_share(config: Config, size: EngineSize, file: LimitsFile) -> ElasticShare:
    largest = max(config.actor.max_tensor_parallel_size, size.tensor_parallel_size)
    if file.refused_path.exists():  # what was asked for before did not start: no second attempt
        largest = size.tensor_parallel_size
    return ElasticShare(
        size=size,
        bounds=Bounds(
            min_sequences=min(config.rounds.requests_per_group, size.max_num_seqs),
            max_sequences=size.max_num_seqs,
            max_tensor_parallel_size=largest,
        ),
        max_sequences=size.max_num_seqs,
        tensor_parallel_size=size.tensor_parallel_size,
        by_round=config.publish.when == "round_end",
    )


async def _run_until_stopped(actor: Actor, duties: Iterable[Duty]) -> None:
    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    serving, stopping = asyncio.create_task(actor.run(duties)), asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        # A signal to the whole process group reaches the engine too, perhaps before us.
        await asyncio.wait({stopping}, timeout=_LATE_SIGNAL_S)
    serving.cancel()
    stopping.cancel()
    (outcome,) = await asyncio.gather(serving, return_exceptions=True)
    if stop.is_set():
        logging.info("actor stopped groups=%d", actor.num_emitted)
    elif isinstance(outcome, BaseException):
        raise _first_cause(outcome)


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _wait_for_run() -> command_line.Prepared:
    """The run folder, as soon as it is set up.

    Raises:
      ValueError: it was not in time.
    """
    folder = flags.FLAGS.run_dir
    if folder is None:
        raise ValueError("give --run_dir=FOLDER of a run that was set up")
    deadline = time.monotonic() + _WAIT_S.value
    while not RunFolder(pathlib.Path(folder)).model_path_file.is_file() and time.monotonic() < deadline:
        time.sleep(_RUN_FOLDER_POLL_S)
    return command_line.open_prepared(folder)


if __name__ == "__main__":
    command_line.run(main)
