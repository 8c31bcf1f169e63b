"""Where the time of our update goes, against what the machine's matmuls sustain. One process, one line of JSON.

    python -m tests.bench.learner.profile FOLDER [BATCH]

FOLDER holds the model of the batch (`workload.model_folder`). One update of a batch, `seed0` by default, runs under
jax's profiler. An instant belongs to the operations that run then, in equal shares; an operation belongs to the part
of the learner whose source file its HLO names (a fusion: that of its root). FLOPs are those of the matmuls that really
ran: each one's from its shapes in the compiled program, times its calls in the trace. So recomputation and padding
count; `model_gflop` counts neither: 6 FLOPs a real token and matmul parameter, the head over scored tokens only, and
causal pairs within a sequence for attention.

The ceiling: each kind of matmul of the update (projections, attention, head; forward and both gradients) alone,
jitted, on the same two threads, the best of several runs.
"""

import collections
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from tests.bench.peers import workload
from tests.bench.peers.models import MODELS
from tests.bench.peers.serve import pin, timed

BATCH = "seed0"
NUM_TOP = 12
CONTROL_FLOW = ("while", "call", "conditional")
PARTS = {
    "attention": "learner/model/attention",
    "head and loss": "learner/model/logprobs",
    "diagnostics and loss": "learner/(objective/losses|update/diagnostics|update/loss_fn|update/frozen_policies)",
    "layers": "learner/model/",
    "optimizer": "learner/update/optimizer|/optax/",
    "accumulation": "learner/update/step",
}
"""Part -> pattern of source files; the first that occurs in an operation's stack decides."""
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = \w+\[([\d,]*)\]\S* (\w[\w-]*)\((.*)$")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


class Operation(NamedTuple):
    """An instruction of a compiled module."""

    part: str
    where: str
    flop: float
    """Of one call; matmuls only."""


class Span(NamedTuple):
    """One execution of an operation, in seconds."""

    key: tuple[str, str]
    """Module and instruction."""
    start: float
    end: float


def read_module(text: str, module: str) -> dict[str, Operation]:
    """The instructions of an optimized module, by name."""
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] | None = None
    shapes: dict[str, list[int]] = {}
    flops: dict[str, float] = {}  # by instruction, and by computation
    computation, found = "", {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif rows is not None and (row := re.match(r"(\d+) (.*)", line)):
            rows[int(row[1])] = row[2]
        elif header := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            name, dims, kind, rest = instruction.groups()
            shapes[name] = [int(d) for d in dims.split(",") if d]
            if kind == "dot" and (contracted := _CONTRACTED.search(rest)):
                operand = re.findall(r"%([\w.-]+)", rest)[0]
                inner = [shapes[operand][int(d)] for d in contracted[1].split(",")]
                flops[name] = 2.0 * float(np.prod(shapes[name])) * float(np.prod(inner))
                flops[computation] = flops.get(computation, 0.0) + flops[name]
            elif kind == "fusion" and (called := re.search(r"calls=%([\w.-]+)", rest)):
                flops[name] = flops.get(called[1], 0.0)
            frame = re.search(r"stack_frame_id=(\d+)", rest)
            scope = re.search(r'op_name="([^"]*)"', rest)
            files = _files(int(frame[1]), tables) if frame else []
            found[name] = Operation(
                part=_part(files, module), where=_where(files, scope[1] if scope else kind), flop=flops.get(name, 0.0)
            )
    return found


def _files(frame: int, tables: dict[str, dict[int, str]]) -> list[str]:
    """`file:line` of a frame and its callers, innermost first."""
    files: list[str] = []
    for _ in range(100):
        row = tables["StackFrames"].get(frame, "")
        location = re.search(r"file_location_id=(\d+)", row)
        if not location:
            break
        place = tables["FileLocations"][int(location[1])]
        file, line = re.search(r"file_name_id=(\d+)", place), re.search(r"\bline=(\d+)", place)
        if file and line:
            files.append(f"{tables['FileNames'][int(file[1])].strip(chr(34))}:{line[1]}")
        parent = re.search(r"parent_frame_id=(\d+)", row)
        if not parent or int(parent[1]) == frame:
            break
        frame = int(parent[1])
    return files


def _part(files: list[str], module: str) -> str:
    if module == "jit__apply":
        return "optimizer"
    for part, pattern in PARTS.items():
        if any(re.search(pattern, f) for f in files):
            return part
    return "other"


def _where(files: list[str], scope: str) -> str:
    ours = next((f for f in files if "/learner/" in f), "")
    return f"{ours.rpartition('/learner/')[2]} {scope.rpartition('/')[2]}".strip()


def spans_of(trace: pathlib.Path) -> list[Span]:
    """Executions in a trace. An operation that goes on in the background ends where its `end:` event does."""
    starts, ends = [], {}
    for plane in ProfileData.from_file(str(trace)).planes:
        for event in (e for line in plane.lines for e in line.events):
            stats = dict(event.stats)
            stop = (event.start_ns + event.duration_ns) / 1e9
            if event.name.startswith("end: "):
                ends[stats.get("_c")] = stop
            elif "hlo_op" in stats:
                key = (str(stats["hlo_module"]), str(stats["hlo_op"]))
                starts.append((key, event.start_ns / 1e9, stop, stats.get("_p")))
    return [Span(key, start, max(stop, ends.get(token, 0.0))) for key, start, stop, token in starts]


def shares(spans: list[Span]) -> dict[tuple[str, str], float]:
    """Seconds of each operation: every instant in equal parts to those that run then."""
    edges = sorted([(s.start, 1, i) for i, s in enumerate(spans)] + [(s.end, 0, i) for i, s in enumerate(spans)])
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    running: set[int] = set()
    before = 0.0
    for now, is_start, i in edges:
        for j in running:
            seconds[spans[j].key] += (now - before) / len(running)
        before = now
        (running.add if is_start else running.discard)(i)
    return dict(seconds)


def matmul_gflops(products: list[tuple[str, tuple[int, ...], tuple[int, ...]]], *, runs: int = 5) -> float:
    """What these einsums sustain, one after the other."""
    flop = seconds = 0.0
    for spec, left, right in products:
        sizes = dict(zip(spec.partition("->")[0].replace(",", ""), (*left, *right), strict=True))
        flop += 2.0 * float(np.prod(list(sizes.values())))
        keys = jax.random.split(jax.random.key(0))
        operands = [jax.random.normal(k, shape) for k, shape in zip(keys, (left, right), strict=True)]
        product = jax.jit(lambda a, b, spec=spec: jnp.einsum(spec, a, b))
        times = []
        for _ in range(runs + 1):
            start = time.perf_counter()
            jax.block_until_ready(product(*operands))
            times.append(time.perf_counter() - start)
        seconds += min(times[1:])
    return flop / seconds / 1e9


def ceilings(model: dict, rows: int, row_tokens: int, scored: int) -> dict[str, float]:
    """GFLOP/s of the update's matmuls by part: y = x w^T, dx = dy w, dw = dy^T x, and attention's."""
    slots, dim, mlp, hd = rows * row_tokens, model["hidden_size"], model["intermediate_size"], model["head_dim"]
    kernels = [(model["num_attention_heads"] * hd, dim), (mlp, dim), (dim, mlp)]

    def linear(n: int, out: int, width: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        return [
            ("nd,od->no", (n, width), (out, width)),
            ("no,od->nd", (n, out), (out, width)),
            ("no,nd->od", (n, out), (n, width)),
        ]

    heads = rows, model["num_attention_heads"]
    return {
        "layers": matmul_gflops([p for out, width in kernels for p in linear(slots, out, width)]),
        "head and loss": matmul_gflops(linear(scored, model["vocab_size"], dim), runs=3),
        "attention": matmul_gflops(
            [
                ("bhqd,bhkd->bhqk", (*heads, row_tokens, hd), (*heads, row_tokens, hd)),
                ("bhqk,bhkd->bhqd", (*heads, row_tokens, row_tokens), (*heads, row_tokens, hd)),
            ]
        ),
    }


def model_flop(batch: workload.Batch, model: dict) -> float:
    """FLOPs of an update that nobody can save: no padding, no recomputation, causal pairs only, each prompt once."""
    from tests.bench.learner.ours import is_one_prompt  # with jax's flags set

    dim, hd, heads, layers = (model[k] for k in ("hidden_size", "head_dim", "num_attention_heads", "num_hidden_layers"))
    kernel = dim * hd * 2 * (heads + model["num_key_value_heads"]) + 3 * dim * model["intermediate_size"]
    sizes = np.array([p.size + r.size for p, r in zip(batch.prompts, batch.responses, strict=True)], np.float64)
    pairs, tokens = (sizes * (sizes + 1) / 2).sum(), sizes.sum()
    if is_one_prompt(batch):
        again = np.array([p.size for i, p in enumerate(batch.prompts) if i % workload.GROUP_SIZE], np.float64)
        pairs, tokens = pairs - (again * (again + 1) / 2).sum(), tokens - again.sum()
    attention = 4 * pairs * heads * hd * layers
    scored = sum(r.size for r in batch.responses)
    return 6 * tokens * kernel * layers + 6 * scored * model["vocab_size"] * dim + 3 * attention


def main() -> None:
    """Traces an update and prints."""
    pin()
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as temporary:
        dump = pathlib.Path(temporary)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}/hlo --xla_dump_hlo_as_text"
        from tests.bench.learner.ours import OurSide  # XLA reads its flags once, at the first computation

        name = sys.argv[2] if len(sys.argv) > 2 else BATCH
        side = OurSide(pathlib.Path(sys.argv[1]), name)
        for _ in range(2):
            side.step()
        timing = min((timed(side.step) for _ in range(5)), key=lambda t: t["s"])
        with jax.profiler.trace(str(dump / "trace")):
            side.step()
        spans = spans_of(next((dump / "trace").rglob("*.xplane.pb")))
        operations = {}
        for path in (dump / "hlo").glob("*after_optimizations.txt"):
            module = path.name.split(".")[1]
            if module in ("jit__accumulate", "jit__apply"):
                operations |= {(module, k): v for k, v in read_module(path.read_text(), module).items()}
    leaves = [s for s in spans if not s.key[1].startswith(CONTROL_FLOW) and s.key in operations]
    seconds, calls = shares(leaves), collections.Counter(s.key for s in leaves)
    batch, model = workload.make_batch(name), MODELS[workload.BATCHES[name].model]
    rows, row_tokens = side.shape
    rates = ceilings(model, rows, row_tokens, scored=sum(r.size for r in batch.responses))
    by_part: dict[str, dict[str, float]] = {}
    for key, s in seconds.items():
        part = by_part.setdefault(operations[key].part, {"gflop": 0.0, "s": 0.0})
        part["gflop"] += operations[key].flop * calls[key] / 1e9
        part["s"] += s
    parts = [
        {"name": name, **p, "least_s": p["gflop"] / rates.get(name, rates["layers"])}
        for name, p in sorted(by_part.items(), key=lambda item: -item[1]["s"])
    ]
    gflop, least = sum(p["gflop"] for p in parts), sum(p["least_s"] for p in parts)
    top = sorted(seconds, key=lambda key: -seconds[key])[:NUM_TOP]
    answer = {
        "batch": name,
        "remat": side.remat,
        "slots": rows * row_tokens,
        "real_tokens": batch.num_real_tokens,
        "ceiling_gflops": gflop / least,
        "rates_gflops": rates,
        "gflop": gflop,
        "model_gflop": model_flop(batch, model) / 1e9,
        "update_s": timing["s"],
        "traced_s": sum(seconds.values()),
        "foreign": timing["foreign"],
        "load": timing["load"],
        "parts": parts,
        "top": [
            {"name": f"{k[0]} {k[1]}", "s": seconds[k], "calls": calls[k], "where": operations[k].where} for k in top
        ],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
