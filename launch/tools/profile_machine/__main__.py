"""Measures this machine for the planner: `python -m launch.tools.profile_machine --config=FILE --out=profile.json`.

Runs a real engine and a real learner of the given config. Measures tokens/s by number of running sequences (about
--context_tokens tokens each) and KV capacity. Measures the costs of a prompt token, a training token, an optimizer
step, and a publish on both sides. Also measures the lengths of the model's responses to its own prompts, and the speed
of store.url. `python -m launch.tools.plan --profile=FILE` reads the result. Edit it to plan for other numbers of
engines and chips, or other lengths. With --store_only, only the store is measured, and its part of an existing file is
replaced.
"""

import contextlib
import json
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from bridge.store.sqlite_database import LOOK_S
from configs.run_folder import snapshot_folder
from configs.sections import StoreConfig
from launch import cli
from launch.startup import prepare_run
from launch.supervision.placement import VISIBLE, Machine, place
from launch.tools.out_file import check_out_file, write_out_file
from launch.tools.profile_machine.measure_engine import PROMPT_TOKENS
from launch.tools.profile_machine.measure_store import is_server, put_store, store_profile
from launch.tools.profile_machine.profile_worker import ChildError, RpcProcess, wait_for

_OUT = flags.DEFINE_string("out", "profile.json", "JSON file for the profile.")
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 64, "Prompts whose responses are sampled for their lengths.", lower_bound=1
)

_CONTEXT = flags.DEFINE_integer(
    "context_tokens",
    0,
    "Approximate prompt and response tokens per sequence while the engine's speed is measured. 0 means half of "
    "model.max_tokens.",
    lower_bound=0,
)

_SIZES = flags.DEFINE_list(
    "tensor_parallel_sizes",
    [],
    "Tensor parallel sizes whose engines are measured, one after the other, besides actor.tensor_parallel_size.",
)

_STORE_ONLY = flags.DEFINE_bool(
    "store_only",
    False,
    "Measure only store.url (or a new SQLite file) and keep the rest of --out.",
)

SHARED_FLAGS = ("config", "print_config")
"""Shared flags that this command accepts."""
_START_S, _ANSWER_S = 900.0, 1800.0
_NUM_PUBLISHES = 4
"""Number of publishes; the first is discarded because it maps cold memory."""
_LONGEST_TOKENS = 128
"""Maximum response length in tokens for measuring an engine's speed."""


def main() -> int:
    """Measures and writes the profile; returns 1 if a process failed, after printing the end of its log."""
    with cli.usage_errors():
        out = check_out_file(_OUT.value)
        config = prepare_run.config()
        max_tokens = config.model.max_tokens
        if _CONTEXT.value > max_tokens:
            raise ValueError(f"--context_tokens={_CONTEXT.value} is above model.max_tokens={max_tokens}")
        sizes = _sizes(config.actor.tensor_parallel_size)
        if _STORE_ONLY.value:
            return _measure_store(config.store, out)
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as root:
        # Nothing of the measured run goes to where the real one will be.
        forced = {"run.dir": str(pathlib.Path(root) / "run"), "store.url": "", "store.bucket": ""}
        forced |= {"publish.bucket": "", "publish.serve": "none"}
        with cli.usage_errors():
            prepared = prepare_run.prepare_run(("learner", "actor"), forced=forced)
        try:
            profile = measure(
                prepared,
                pathlib.Path(root),
                store=config.store,
                num_prompts=_NUM_PROMPTS.value,
                context_tokens=_CONTEXT.value,
                sizes=sizes,
            )
        except (ChildError, ValueError) as e:
            print(f"error: {e}")
            return 1
        finally:
            shutil.rmtree(snapshot_folder(prepared.config), ignore_errors=True)
    with cli.usage_errors():
        write_out_file(out, json.dumps(profile, indent=2) + "\n")
    print(f"profile      {out}")
    for size, engine in {profile["chips_per_engine"]: profile["engine"], **profile["engine_by_size"]}.items():
        print(f"  engine of {size} devices, KV cache of {engine['kv_capacity_tokens']} tokens")
        for running, rate in zip(engine["running"], engine["tokens_per_s"], strict=True):
            print(f"  {running:4d} sequences  {rate:9.0f} tokens/s")
    print(f"  training     {1 / profile['learner']['seconds_per_token']:9.0f} tokens/s per device")
    return 0


def _sizes(own: int) -> list[int]:
    """Returns the further tensor parallel sizes to measure; raises ValueError if one is not a number >= 1."""
    try:
        sizes = sorted({int(size) for size in _SIZES.value} - {own})
    except ValueError:
        sizes = [0]
    if min(sizes, default=1) < 1:
        raise ValueError(f"--tensor_parallel_sizes: expected a list such as 1,2,4, got {','.join(_SIZES.value)!r}")
    return sizes


def _measure_store(config: StoreConfig, out: pathlib.Path) -> int:
    try:
        store = put_store(config, out)
    except ChildError as e:
        print(f"error: {e}")
        return 1
    print(f"profile      {out}")
    print(f"  store        {1 / store['group_s']:9.0f} groups/s")
    return 0


def measure(
    prepared: prepare_run.PreparedRun,
    logs: pathlib.Path,
    *,
    store: StoreConfig,
    num_prompts: int,
    context_tokens: int,
    sizes: Sequence[int] = (),
) -> dict[str, Any]:
    """Measures a profile of this machine for `launch/tools/plan/profile.py`, with one learner and one engine at a time.

    `context_tokens` is the sequence length while measuring the engine's speed; 0 means half of model.max_tokens.
    `sizes` are further tensor parallel sizes. The store is measured only if it is a server. Raises ChildError if a
    process failed or hung.
    """
    config = prepared.config
    own = config.actor.tensor_parallel_size
    num_tokens = max(8, min(_LONGEST_TOKENS, config.model.max_tokens - PROMPT_TOKENS))
    decoding = {"num_tokens": num_tokens, "context_tokens": context_tokens or config.model.max_tokens // 2}
    placement = place(config, Machine.here())
    with _worker(prepared, logs, "learner", own, devices=placement.learner) as learner:
        with _worker(prepared, logs, "engine", own) as engine:
            for side, other in ((learner, engine), (engine, learner)):
                wait_for(side, other, deadline_s=_START_S)
            publishes = [
                _ask(learner, engine, "publish") | _ask(engine, learner, "update") for _ in range(_NUM_PUBLISHES)
            ][1:]
            publish = {name: statistics.median(p[name] for p in publishes) for name in publishes[0]}
            publish["prefetch_s"] += LOOK_S / 2  # mean delay until an actor notices it
            problems = _ask(learner, engine, "problems", count=num_prompts)
            lengths = _ask(
                engine, learner, "lengths", prompts=problems["prompts"], stop_token_ids=problems["stop_token_ids"]
            )
            profile = {
                "engine": _ask(engine, learner, "decoding", **decoding),
                "chips_per_engine": own,
                "num_learner_chips": config.mesh.num_devices,
                "response_tokens": {"kind": "groups", "groups": lengths["groups"]},
                "prompt_tokens": {"kind": "groups", "groups": [[len(p)] for p in problems["prompts"]]},
                "learner": _ask(learner, engine, "training"),
                "publish": publish,
                "claim_s": LOOK_S / 2,  # mean delay, as above
                **_ask(engine, learner, "judging", task=problems["task"]),
                # A file store serves only the few actors of one machine, and measuring it takes time.
                **({"store": store_profile(store, logs)} if is_server(store) else {}),
            }
        by_size = {}
        for size in sizes:
            with _worker(prepared, logs, "engine", size) as engine:
                wait_for(engine, learner, deadline_s=_START_S)
                _ask(engine, learner, "update")
                by_size[size] = _ask(engine, learner, "decoding", **decoding)
    return profile | {"engine_by_size": by_size}


@contextlib.contextmanager
def _worker(
    prepared: prepare_run.PreparedRun, logs: pathlib.Path, role: str, size: int, devices: Sequence[str] = ()
) -> Iterator[RpcProcess]:
    """Yields a worker process, which is closed after any error; it sees all devices if none are given."""
    arguments = [role, str(prepared.folder), str(size)]
    env = {VISIBLE: ",".join(devices)} if devices else {}
    module = "launch.tools.profile_machine.profile_worker"
    child = RpcProcess(module, arguments, logs / f"{role}-{size}.log", env=env)
    with contextlib.closing(child):
        yield child


def _ask(side: RpcProcess, other: RpcProcess, do: str, **arguments: Any) -> dict[str, Any]:
    side.send({"do": do, **arguments})
    return wait_for(side, other, deadline_s=_ANSWER_S)


if __name__ == "__main__":
    cli.run(main)
