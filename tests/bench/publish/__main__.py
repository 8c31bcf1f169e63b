"""What publishing weights takes: export, write, hash, fetch, verify, load; what a slow link and a delta change.

    python -m tests.bench.publish [--parts=local,network,link,held,delta,swap] [--sizes=0.3B,1.2B]

Each part is a process of its own, of a few minutes at most, and what it found is kept in the result, so that parts can
be run one by one; values are of all that is there. A part that fails, or for which there is too little memory, says so
and is left out. Run it on a quiet machine.

A ratio over memcpy is memcpy's seconds for the published bytes, by one thread into warm memory, over theirs. Both were
timed in turns in the same process, and the ratio is the median of the rounds'. Of two sizes the worse one counts.
`write` is bfloat16 parameters into the warm slot; `naive` is numpy's and ml_dtypes' cast, tensor by tensor;
`device_cast` is XLA's into new memory. `http_bytes` is the way of the bytes without their hashes, `http` is all of a
fetch; `network_cpu_over_memcpy` is what the former takes of reader's and server's processors together, over memcpy's:
twice its inverse is the ratio that two idle cores could reach. `learner_held_up_share` is what `publish` took of the
learner's time over the time from the hand-over to the announcement; `slowdown_beside` is a micro-batch beside a publish
against one alone, since both share the cores. `swap` is a vLLM engine on a model of SmolLM2-135M's shape in float32;
pauses over memcpy are without what vLLM takes to pause and resume; `check_cpu` is the engine's processor time in the
check; `busy` is beside 32 requests, where a pause begins with the end of the step under way; `tokens_lost_share` is of
the tokens of six seconds. `load` is the machine's load average when a part began.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil
from absl import app, flags

from tests.bench.harness import result
from tests.bench.harness.parts import last_line_of
from tests.bench.publish.sizes import SIZES

PARTS = ("local", "network", "link", "held", "delta", "swap")
AIMS = {
    "publish_over_memcpy": result.at_least(0.5, "ours"),
    "attach_ms": result.at_most(5.0, "ours"),
    "network_over_memcpy": result.at_least(0.4, "ours"),
    "network_tls_over_memcpy": result.at_least(0.15, "ours"),
    "pause_ratio_slow_link": result.at_most(1.1, "ours"),
    "learner_held_up_share": result.at_most(0.05, "ours"),
    "delta_ratio_lr1e-6": result.at_least(20.0, "ours"),
    "delta_ratio_lr1e-5": result.at_least(8.0, "ours"),
    "swap_pause_over_memcpy": result.at_most(2.0, "ours"),
    "swap_check_cpu_s": result.at_most(1.0, "ours"),
}
_PARTS = flags.DEFINE_list("parts", list(PARTS), "Which parts are measured now.")
_SIZES = flags.DEFINE_list("sizes", list(SIZES), "Which models; link and held take the first alone.")
_BYTES_A_PARAMETER = 15
"""Memory that the largest part takes: float32 parameters, two slots, a copy, and what memcpy copies."""


def jobs(parts: list[str], sizes: list[str]) -> dict[str, tuple[str, ...]]:
    """What is run, by its name in the results: a module of this package and its arguments.

    Raises ValueError if a part or size is unknown.
    """
    if unknown := [*(set(parts) - set(PARTS)), *(set(sizes) - set(SIZES))]:
        raise ValueError(f"got {sorted(unknown)}, wanted --parts of {PARTS} and --sizes of {tuple(SIZES)}")
    found: dict[str, tuple[str, ...]] = {}
    if "local" in parts:
        cores = range(1, 1 + min(2, len(os.sched_getaffinity(0))))
        found |= {f"local {size} {n}": ("local", size, str(n)) for size in sizes for n in cores}
    if "network" in parts:
        found |= {f"network {size}": ("network", size) for size in sizes}
    found |= {f"{part} {sizes[0]}": (part, sizes[0]) for part in ("link", "held") if part in parts}
    found |= {part: (part,) for part in ("delta", "swap") if part in parts}
    return found


def run(job: tuple[str, ...]) -> dict[str, Any]:
    """What a part found, or why it found nothing."""
    module, *arguments = job
    load = os.getloadavg()[0]
    if arguments:
        needed = SIZES[arguments[0]].num_parameters * _BYTES_A_PARAMETER
        if (available := psutil.virtual_memory().available) < needed:
            return {"left_out": f"needs {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} are available"}
    try:
        found = last_line_of(f"tests.bench.publish.{module}", *arguments)
        return found.get("values", found) | {"load": load}
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        return {"left_out": str(e), "load": load}


def values_of(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the bench's values; of several sizes the worst. What was not measured is None."""

    def worst(part: str, name: str, cores: str = "") -> float | None:
        found = [
            of[name]
            for words, of in ((key.split(), of) for key, of in parts.items())
            if words[0] == part and (not cores or words[-1] == cores) and of.get(name) is not None
        ]
        is_cost = name in ("attach_s", "slowdown_beside") or (name in AIMS and AIMS[name].low is None)
        return (max if is_cost else min)(found) if found else None

    attach_s = worst("local", "attach_s")
    return {
        "publish_over_memcpy": worst("local", "publish_over_memcpy", "1"),
        "publish_over_memcpy_2": worst("local", "publish_over_memcpy", "2"),
        "attach_ms": None if attach_s is None else 1e3 * attach_s,
        "learner_slowdown_beside": worst("held", "slowdown_beside"),
        **{k: worst("network", k) for k in ("network_over_memcpy", "network_tls_over_memcpy")},
        **{k: worst(part, k) for part, k in (("link", "pause_ratio_slow_link"), ("held", "learner_held_up_share"))},
        **{k: worst("delta", k) for k in ("delta_ratio_lr1e-6", "delta_ratio_lr1e-5")},
        **{k: worst("swap", k) for k in ("swap_pause_over_memcpy", "swap_check_cpu_s")},
    }


def main(argv: list[str]) -> None:
    """Runs the parts that were asked for, and tells what all of them found."""
    del argv
    parts: dict[str, dict[str, Any]] = (result.stored("publish") or {"parts": {}})["parts"]
    for name, job in jobs(_PARTS.value, _SIZES.value).items():
        parts[name] = run(job)
        print(name, json.dumps(parts[name]), flush=True)
    values = values_of(parts)
    with_one = values["publish_over_memcpy"] or 0.0
    result.finish(
        "publish",
        __doc__,
        values=values,
        aims=AIMS | {"publish_over_memcpy_2": result.at_least(max(0.5, with_one), "ours: faster than on one core")},
        rows=[
            {"part": part, "name": name, "value": f"{value:.4g}" if isinstance(value, float) else value}
            for part, found in sorted(parts.items())
            for name, value in found.items()
        ],
        columns={"part": "{part}", "": "`{name}`", "value": "{value}"},
        beside="nothing else of ours",
        parts=parts,
    )


if __name__ == "__main__":
    app.run(main)
