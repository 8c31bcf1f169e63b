"""What Sluice prints where something is wrong, provoked: each function makes it go wrong and returns what was said."""

import asyncio
import contextlib
import json
import pathlib
import shutil
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from actor.rewards.verifiers.judge import Judge
from actor.sandbox.self_test import missing
from actor.weights import model_folder
from bridge.credentials import Tls
from bridge.files import RunLock
from bridge.snapshots.remote.range_server import listen
from bridge.store.admin import open_runs
from configs import overrides
from configs.race_capacity import check_race_capacity
from configs.run_folder import RunFolder, set_up_run
from configs.schema import Config
from configs.sections import RunConfig
from configs.sections.rewards import JudgeConfig
from launch.live_view import PlainProgress, RunView
from launch.startup import join_run, preflight
from launch.tools.report.server import make_server
from learner.restore import check_same
from learner.update_metrics import StepMetrics
from tests.launch.commands import call_each
from tests.launch.tools.report.folder import make_folder
from tests.learner.model_folder import make_model_folder

TINY = "--config=tiny"
OWN_ROWS = ["--config.prompts.task=", "--config.prompts.task_args={}", "--config.prompts.pattern="]
SMALL = ["--config.model.path=models/small", "--config.model.max_tokens=64"]
LOCAL = [
    [TINY, "--config.loss.nam=tis"],
    [TINY, "--config.actor.num_engines=two"],
    [TINY, "--config.publish.when=never"],
    [TINY, "--config.run.num_updates=15"],
    [TINY, "--config.rounds.max_lag_steps=0"],
    [TINY, "--config.mesh.fsdp=2", "--config.packing.rows=3"],
    [TINY, "--config.model.path=models/none"],
    [TINY, "--config.model.path=models/small", "--config.model.max_tokens=4096", "--config.packing.row_tokens=4096"],
    [TINY, *SMALL, *OWN_ROWS, "--config.prompts.verifier=math", "--config.prompts.path=missing.jsonl"],
    [TINY, *SMALL, *OWN_ROWS, "--config.prompts.verifier=math", "--config.prompts.path=words.jsonl"],
    [TINY, *SMALL, *OWN_ROWS, "--config.prompts.verifier=math", "--config.prompts.path=rows.jsonl"]
    + ["--config.rewards.check_gold_answers=0"],
    [TINY, "--config.loss.name=my_losses:soft"],
    [TINY, "--config.run.seed=1"],
    [TINY, *SMALL, "--config.run.dir=runs/locked"],
    [TINY, "--config.run.trackers=tensorboard,wandb"],
    [TINY, "--config.publish.serve=https"],
    [TINY, "--config.publish.serve=https", "--config.publish.listen=0.0.0.0:8443"],
]


def commands(place: pathlib.Path) -> Iterator[str]:
    """`launch.local`, started with what it can't use; none gets as far as a process."""
    make_model_folder(place / "models" / "small")
    rows = [{"prompt": f"What is {i} + {i + 1}? " * 40, "answer": 2 * i + 1} for i in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ({"question": row["prompt"], "answer": row["answer"]} for row in rows)
    (place / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
    tiny = overrides.load_preset("tiny")
    locked = {"model.path": f"{place}/models/small", "model.max_tokens": "64", "run.dir": "runs/locked"}
    with contextlib.chdir(place):
        set_up_run(tiny)
        folder = set_up_run(overrides.apply(tiny, locked))
        lock = RunLock(RunFolder(folder).supervisor_lock, "launch.local")
    lines = [[*line, f"--config.run.name=run-{i}"] if "seed" not in line[-1] else line for i, line in enumerate(LOCAL)]
    lines = [line[:-1] if "runs/locked" in line[-2] else line for line in lines]
    try:
        for done in call_each("launch.local", lines, cwd=place):
            assert done.code == 2, done
            yield from done.err.splitlines()
    finally:
        lock.release()


def refusals(place: pathlib.Path) -> Iterator[str]:
    """What functions refuse that a command calls after a longer way."""
    small = make_model_folder(place / "refusals")
    with open(small / "model.safetensors", "wb") as weights:
        weights.truncate(16 << 30)
    config = overrides.load_preset("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1 << 20))  # pyright: ignore
        patch.chdir(place)
        pathlib.Path("runs").mkdir(exist_ok=True)
        yield refused(preflight.check_snapshot_room, config, small)
        yield refused(preflight.check_disk_space, config, small)
        here = pathlib.Path("runs/tiny")
        model = {"hidden_size": 64, "num_hidden_layers": 2}
        yield refused(check_same, "model", model, {"hidden_size": 128, "num_hidden_layers": 4}, here)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        yield refused(listen, f"127.0.0.1:{port}", scheme="http", token=None, tls=Tls())
        yield refused(make_server, [make_folder(place / "run", steps=2)], port=port)
    yield refused(_isolate)
    yield refused(_look_up)
    yield f"judge unreachable, retrying: {refused(_ask).removeprefix('error: ')}"
    card = SimpleNamespace(name="tiny", sluice="0.0.9", vllm="")
    yield refused(model_folder.check_versions, card, vllm="")
    yield refused(join_run.check_no_password, "postgresql://learner:secret@db.example/sluice")
    yield refused(StepMetrics.check_skipped, SimpleNamespace(_num_skipped_in_a_row=5), 37)


def notes(place: pathlib.Path) -> Iterator[str]:
    """What is said of a run that goes on."""
    rolled = overrides.load_preset("rollpacker:tiny")
    yield f"warning: {check_race_capacity(rolled, num_engines=1, max_num_seqs=32)}"
    folder, lines, now = place / "view", [], [0.0]
    folder.mkdir()
    view = RunView(Config(preset="test", run=RunConfig(num_updates=240)), folder)
    announcer = PlainProgress(view, lines.append, lambda: now[0])
    view.status = {"learner": "waiting", "actor-0": "engine: building the model"}
    for _ in range(80):
        announcer.update(view.update())
        now[0] += 1
    row = {"kind": "step", "step": 40, "reward/mean": 0.0, "lag/mean": 0.5, "ess": 1.0, "tokens_per_s": 1904.0}
    held_out = {"kind": "eval", "step": 40, "eval/reward": 0.3, "problems": 8}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, held_out)))
    announcer.update(view.update())
    yield from lines
    yield view.line()


def refused(function: Callable[..., Any], *given: Any, **named: Any) -> str:
    """What a command prints where a function refuses."""
    with pytest.raises((ValueError, RuntimeError, OSError)) as e:
        function(*given, **named)
    return f"error: {e.value}"


def _isolate() -> None:
    raise ValueError(
        f"code rewards cannot run: programs cannot be isolated on this machine: {missing('it is not installed')}"
    )


def _look_up() -> None:
    with open_runs("postgresql://learner@127.0.0.1:9/sluice", retry_s=0.1) as runs:
        runs.all()


def _ask() -> None:
    async def ask() -> None:
        judge = Judge(JudgeConfig(url="http://127.0.0.1:9/v1", model="m", timeout_s=5.0))
        try:
            await judge._post({})
        finally:
            await judge.close()

    asyncio.run(ask())
