"""What the publish bench's parts found, as aims and as a page."""

import math
from collections.abc import Mapping
from typing import Any

AIMS = {
    "publish_over_memcpy": 0.5,
    "publish_over_memcpy_2": 0.5,
    "attach_ms": 5.0,
    "network_over_memcpy": 0.4,
    "network_tls_over_memcpy": 0.15,
    "pause_ratio_slow_link": 1.1,
    "learner_held_up_share": 0.05,
    "delta_ratio_lr1e-6": 20.0,
    "delta_ratio_lr1e-5": 8.0,
    "swap_pause_over_memcpy": 2.0,
    "swap_check_cpu_s": 1.0,
}
_AT_MOST = (
    "attach_ms",
    "pause_ratio_slow_link",
    "learner_held_up_share",
    "swap_pause_over_memcpy",
    "swap_check_cpu_s",
)
Parts = Mapping[str, Mapping[str, Any]]
"""By the part's name and the size of its model, as in `local 0.3B 1`; of each, what its `measure` returned."""


def values_of(parts: Parts) -> dict[str, Any]:
    """The bench's values, by key; of several sizes the worst. What was not measured is None."""

    def worst(part: str, name: str, cores: str = "") -> float | None:
        found = [v[name] for k, v in parts.items() if _is_of(k, part, cores) and v.get(name) is not None]
        if not found:
            return None
        return max(found) if name in (*_AT_MOST, "attach_s", "slowdown_beside") else min(found)

    attach_s = worst("local", "attach_s")
    return {
        "publish_over_memcpy": worst("local", "publish_over_memcpy", "1"),
        "publish_over_memcpy_2": worst("local", "publish_over_memcpy", "2"),
        "attach_ms": None if attach_s is None else 1e3 * attach_s,
        **{k: worst("network", k) for k in ("network_over_memcpy", "network_tls_over_memcpy")},
        "pause_ratio_slow_link": worst("link", "pause_ratio_slow_link"),
        "learner_held_up_share": worst("held", "learner_held_up_share"),
        "learner_slowdown_beside": worst("held", "slowdown_beside"),
        **{k: worst("delta", k) for k in ("delta_ratio_lr1e-6", "delta_ratio_lr1e-5")},
        **{k: worst("swap", k) for k in ("swap_pause_over_memcpy", "swap_check_cpu_s")},
    }


def aims_of(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each aim with its value; one that was not measured is not met.

    Two cores must also be faster than one: the aim is the larger of the two bounds.
    """
    aims = {}
    for key, aim in AIMS.items():
        value = values[key]
        if key == "publish_over_memcpy_2" and values["publish_over_memcpy"] is not None:
            aim = max(aim, values["publish_over_memcpy"])
        met = value is not None and math.isfinite(value) and (value <= aim if key in _AT_MOST else value >= aim)
        aims[key] = {"value": value, "aim": aim, "met": met}
    return aims


def page(parts: Parts, values: Mapping[str, Any], machine: str) -> str:
    """The whole page."""
    aims = aims_of(values)
    lines = ["# Publishing weights", "", f"`python -m tests.bench.publish`, on {machine}", ""]
    lines += ["| key | value | aim | met |", "|---|---|---|---|"]
    for key, a in aims.items():
        bound = f"{'<=' if key in _AT_MOST else '>='} {a['aim']:.3g}"
        lines.append(f"| `{key}` | {_number(a['value'])} | {bound} | {'yes' if a['met'] else '**no**'} |")
    lines += ["", *_ABOUT, ""]
    for name, found in sorted(parts.items()):
        lines += [f"## {name}", "", "| | |", "|---|---|"]
        lines += [f"| `{k}` | {_number(v)} |" for k, v in found.items() if isinstance(v, int | float | str | None)]
        lines.append("")
    return "\n".join(lines)


_ABOUT = (
    "A ratio over memcpy is memcpy's seconds for the published bytes, by one thread into warm memory, over theirs. "
    "Both were timed in turns in the same process, and the ratio is the median of the rounds'. Of two sizes the worse "
    "one counts. `write` is bfloat16 parameters into the warm slot; `naive` is numpy's and ml_dtypes' cast, "
    "tensor by tensor; `device_cast` is XLA's into new memory. `http_bytes` is the way of the bytes without their "
    "hashes, `http` is all of a fetch; `network_cpu_over_memcpy` is what the former takes of reader's and server's "
    "processors together, over memcpy's: twice its inverse is the ratio that two idle cores could reach. "
    "`learner_held_up_share` is what `publish` took of the learner's "
    "time over the time from the hand-over to the announcement; `slowdown_beside` is a micro-batch beside a publish "
    "against one alone, since both share the cores. `swap` is a vLLM engine on a model of SmolLM2-135M's shape in "
    "float32: `reload` loads all in the pause, `staged` does as engines do, in turns; pauses over memcpy are without "
    "what vLLM takes to pause and resume; `check_cpu` is the engine's processor time in the check; `busy` is beside 32 "
    "requests, where a pause begins with the end of the step under way; `tokens_lost_share` is of the tokens of six "
    "seconds. `load` is the machine's load average when a part began.",
)


def _is_of(name: str, part: str, cores: str) -> bool:
    kind, *rest = name.split()
    return kind == part and (not cores or rest[-1] == cores)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "not measured" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
