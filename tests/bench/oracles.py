"""Records what the learner and the bridge compute, to compare another checkout with bit by bit on the same machine.

    python -m tests.bench.oracles record FOLDER
    python -m tests.bench.oracles compare FOLDER

Both compute the same JSON files, one for each function of `ORACLES`; `compare` prints each value that differs from the
folder's and then exits with 1. Bits depend on the machine and on the libraries, so no record belongs into the
repository. Public names alone are used, and few of them, so that moved modules cost new imports and nothing else.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bridge import codec, timeline
from bridge.param_names import flatten
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from configs import overrides, sections
from learner.distributed.sharding import make_mesh
from learner.metrics.round_times import WaitingRatios
from learner.model.lora import merge
from learner.update.auto_shape import AutoShape
from learner.update.frozen_policies import FrozenPolicies
from learner.update.packing import pack_groups
from learner.update.train_step import build_train_step
from tests.bridge.factories import as_plain, make_group, make_ticket
from tests.bridge.snapshots.whole import write_whole
from tests.learner.streams import MODEL, config_of, fresh_params, random_group

NUM_UPDATES, GROUPS_PER_UPDATE = 8, 8


def digest(tree: Any) -> dict[str, str]:
    """SHA-256 of each leaf's dtype, shape and bytes, by path."""

    def one(leaf: Any) -> str:
        array = np.ascontiguousarray(leaf)
        head = f"{array.dtype} {array.shape} ".encode()
        return hashlib.sha256(head + array.view(np.uint8).tobytes()).hexdigest()

    return {jax.tree_util.keystr(path): one(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def training_configs() -> Iterator[tuple[str, Any]]:
    """The tiny model's configurations, each of one update of eight groups after the other."""
    rounds = sections.RoundsConfig(groups_per_round=8, groups_per_update=8)
    grpo: dict[str, Any] = dict(name="grpo_clip", clip_low=0.2, clip_high=0.28, entropy_coef=0.01)
    decoupled: dict[str, Any] = dict(name="decoupled_ppo", clip_low=0.02, clip_high=0.03, max_weight=5.0)
    lora = sections.LoraConfig(rank=3, alpha=6.0)
    auto = sections.PackingConfig(auto=True, rows=4, row_tokens=64)
    yield "grpo", dataclasses.replace(config_of(**grpo), rounds=rounds)
    yield "bfloat16", dataclasses.replace(config_of(param_dtype="bfloat16", **grpo), rounds=rounds)
    yield "lora", dataclasses.replace(config_of(kl_coef=0.1), rounds=rounds, lora=lora)
    yield "epochs", config_of(epochs=2, publish_every=1, proximal="batch", **decoupled)
    yield "auto", dataclasses.replace(config_of(**grpo), rounds=rounds, packing=auto)
    yield "proximal", config_of(publish_every=2, proximal="published", **decoupled)


def training(folder: pathlib.Path) -> dict[str, Any]:
    """Losses, packed batches and parameters of 8 updates of the tiny model by the same 64 groups."""
    del folder
    return {name: train(config) for name, config in training_configs()}


def train(config: Any) -> dict[str, Any]:
    """The metrics of each update, a hash of what was packed, and hashes of the state after the last one."""
    rng = np.random.default_rng(3)
    groups = [random_group(rng, f"t{i}") for i in range(NUM_UPDATES * GROUPS_PER_UPDATE)]
    steps = build_train_step(MODEL, config, make_mesh(**config.mesh.axes))
    base = None
    if config.lora.is_on:
        base = jax.device_put(fresh_params(), jax.tree.map(lambda x: x.sharding, steps.abstract_base()))
        state = steps.init(steps.init_adapters())
    else:
        dtype = config.model.param_dtype
        state = steps.init(jax.tree.map(lambda x: x.astype(dtype), fresh_params()))
    reference = base if base is not None else fresh_params()
    anchors = FrozenPolicies(steps, config, load_reference=lambda: reference, params=state.params, base=base)
    shape, updates, packed = AutoShape(config), [], hashlib.sha256()
    for update in range(NUM_UPDATES):
        kept = []
        for at in (0, 3, 6):  # groups come by three, and the last two
            index = update * GROUPS_PER_UPDATE + at
            arrived, ends = groups[index : min(index + 3, (update + 1) * GROUPS_PER_UPDATE)], at == 6
            micros = pack_groups(
                arrived,
                packing=shape.choose(arrived, ends_update=ends),
                loss=config.loss,
                max_response_tokens=config.sampling.max_response_tokens,
                ends_update=ends,
            )
            for micro in micros:
                packed.update(json.dumps(digest(micro.batch)).encode())
                scores = anchors.score(micro.batch)
                state = steps.accumulate(state, micro.batch, scores, base)
                if steps.keeps_logprobs:
                    scores = dataclasses.replace(scores, proximal=steps.logprobs)
                kept.append((micro.batch, scores))
        passes = []
        for epoch in range(config.rounds.epochs):
            for batch, scores in kept if epoch else ():
                state = steps.accumulate(state, batch, scores, base)
            state, metrics = steps.apply(state, epoch)
            passes.append({k: np.asarray(v).tolist() for k, v in jax.device_get(metrics).items()})
        updates.append(passes)
        if config.steps_per_proximal <= 1 or update % 2:
            anchors.publish(state.params)
    whole = {} if base is None else merge(base, state.params, scale=config.lora.scale, dtype="float32")
    return {
        "updates": updates,
        "packed": packed.hexdigest(),
        "shape": [shape.packing.rows, shape.packing.row_tokens],
        "params": digest(state.params),
        "optimizer": digest(state.opt_state),
        "merged": digest(whole),
    }


def rounds(folder: pathlib.Path) -> dict[str, Any]:
    """A timeline's events as they are read back, and the metrics of its rounds with their waiting ratios."""
    rng, now_s, clock, metrics = random.Random(5), 1000.0, WaitingRatios(), []
    with contextlib.closing(timeline.Timeline(folder / "events", "learner")) as log:
        for step in range(12):
            if step % 4 == 0:
                clock.rollout_started(now_s)
            now_s += rng.uniform(0.1, 3)
            clock.dispatched(now_s, fills_update=step % 4 > 0)
            start_s, now_s = now_s, now_s + rng.uniform(0.1, 2)
            clock.trained(start_s, now_s)
            log.span("train", start_s, now_s, step=step)
            if step % 3 == 0:
                aside_s = rng.uniform(0.1, 1)
                clock.exclude(aside_s)
                log.span("publish", now_s, now_s + aside_s, lane=1)
                now_s += aside_s
            if step % 4 == 3:
                metrics.append(clock.finish())
                log.instant("round", time_s=now_s, **metrics[-1])
    return {"metrics": metrics, "events": [e for e in timeline.read(folder / "events") if e["ph"] != "M"]}


def snapshots(folder: pathlib.Path) -> dict[str, Any]:
    """The files of a snapshot folder after each of four versions, and the manifests as they are sent."""
    params, rng, found = fresh_params(), np.random.default_rng(11), list[dict[str, Any]]()
    writer = SnapshotWriter(folder / "snap", run="r", tokenizer_hash="t", full_every=3, clock=lambda: 1.5)
    with contextlib.closing(writer):
        for step in range(4):
            tensors = {name: np.asarray(x) for name, x in flatten(params).items()}
            manifest = write_whole(writer, Version(incarnation=0, step=step), tensors, dtype="bfloat16")
            paths = sorted(p for p in (folder / "snap").iterdir() if p.stat().st_size)
            files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}
            sent, fields = codec.encode(manifest), repr(as_plain(manifest)).encode()
            found.append({"sent": hashlib.sha256(sent).hexdigest(), "fields": hashlib.sha256(fields).hexdigest()})
            found[-1]["files"] = files
            params = jax.tree.map(lambda x: x * np.float32(1 + 1e-3 * rng.standard_normal()), params)
    return {"versions": found}


def store(folder: pathlib.Path) -> dict[str, Any]:
    """What a SQLite store answers to seeded claims (by width, part and number of actors), ends, groups and deaths."""
    rng, now, said = random.Random(7), [1000.0], []
    tickets = [make_ticket(f"{o}.{i}", order=o, num_samples=1) for o in range(40) for i in range(2)]
    with contextlib.closing(SqliteStore(folder / "store.db", clock=lambda: now[0])) as desk:
        said.append(["lead", desk.acquire_leadership("here", lease_s=1e6)])
        said.append(["put", desk.put_tickets(tickets)])
        held: dict[str, dict[str, Any]] = {name: {} for name in "abc"}
        for _ in range(400):
            name = rng.choice("abc")
            do, mine = rng.random(), sorted(held[name])
            if do < 0.45:
                options: dict[str, Any] = dict(
                    limit=rng.randrange(1, 5),
                    lease_s=rng.choice([5, 50]),
                    width=rng.choice([None, 1, 2, 4, 8]),
                    among=rng.choice([1, 2, 3]),
                    part=rng.choice([None, 1, 2]),
                    served=rng.sample(mine, min(len(mine), rng.randrange(2))),
                )
                got = desk.claim(name, **options)
                held[name] |= {t.id: t for t in got}
                said.append([name, options, [t.id for t in got]])
            elif do < 0.7 and mine:
                ticket = held[name].pop(rng.choice(mine))
                said.append([name, "group", ticket.id, desk.put_group(make_group(ticket, actor=name))])
            elif do < 0.75:
                desk.release(name, mine[:2])
                said.append([name, "release", [held[name].pop(i).id for i in mine[:2]]])
            elif do < 0.85:
                said.append([name, "renew", repr(desk.renew(name, mine, lease_s=20))])
            elif do < 0.9:
                ids = [t.id for t in rng.sample(tickets, 2)]
                said.append(["reissue", ids, desk.reissue(ids)])
            else:
                now[0] += rng.choice([0.5, 3.0, 10.0])
        groups = desk.read_groups(after_seq=0, limit=100)
        said.append([[g.seq, repr(as_plain(g.group))] for g in groups])
        desk.acknowledge([g.group.ticket_id for g in groups[:5]])
        said.append([g.seq for g in desk.read_groups(after_seq=0, limit=100)])
        said.append(desk.num_reissued())
    return {"said": said}


def configs(folder: pathlib.Path) -> dict[str, Any]:
    """Every preset and recipe, resolved."""
    del folder
    files = {f"{name}.py": name for name in overrides.preset_names()}  # as records of before have them
    files |= {f"recipes/{name}.py": name for name in overrides.recipe_names()}
    return {
        file: json.loads(json.dumps(dataclasses.asdict(overrides.load_preset(name)), default=str))
        for file, name in files.items()
    }


ORACLES: dict[str, Callable[[pathlib.Path], dict[str, Any]]] = {
    "training": training,
    "rounds": rounds,
    "snapshots": snapshots,
    "store": store,
    "configs": configs,
}


def differences(want: Any, got: Any, at: str = "") -> Iterator[str]:
    """A line for each value that differs, with its place."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in sorted({*want, *got}):
            yield from differences(want.get(key), got.get(key), f"{at}/{key}")
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for i, pair in enumerate(zip(want, got, strict=True)):
            yield from differences(*pair, f"{at}/{i}")
    elif json.dumps(want) != json.dumps(got):
        yield f"{at}: recorded {str(want)[:200]}, now {str(got)[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", choices=ORACLES, nargs="+", default=list(ORACLES))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    num_different = 0
    for name in args.only:
        path = args.folder / f"{name}.json"
        with tempfile.TemporaryDirectory() as scratch:
            found = json.loads(json.dumps(ORACLES[name](pathlib.Path(scratch))))
        if args.action == "record":
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: recorded")
            continue
        lines = list(differences(json.loads(path.read_text()), found))
        print(f"{name}: {f'{len(lines)} values differ' if lines else 'as recorded'}")
        print("".join(f"  {line}\n" for line in lines[:20]), end="")
        num_different += len(lines)
    raise SystemExit(1 if num_different else 0)


if __name__ == "__main__":
    main()
