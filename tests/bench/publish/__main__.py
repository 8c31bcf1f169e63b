"""What publishing weights takes: export, write, hash, fetch, verify, load; what a slow link and a delta change.

    python -m tests.bench.publish [--parts=local,network,link,held,delta,swap] [--sizes=0.3B,1.2B]

Each part is a process of its own, of a few minutes at most, and what it found is kept in `results/publish.json`, so
that parts can be run one by one; the page and the line at the end are made of all that is there. A part that fails, or
for which there is too little memory, says so and is left out. Run it on a quiet machine.
"""

import json
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

from absl import app, flags

from tests.bench.publish import report
from tests.bench.publish.sizes import SIZES
from tests.bench.publish.timing import child

PARTS = ("local", "network", "link", "held", "delta", "swap")
_PARTS = flags.DEFINE_list("parts", list(PARTS), "Which parts are measured now.")
_SIZES = flags.DEFINE_list("sizes", list(SIZES), "Which models; link and held take the first alone.")
_RESULTS = flags.DEFINE_string(
    "results", str(pathlib.Path(__file__).parents[1] / "results"), "Folder of publish.json and publish.md."
)
_BYTES_A_PARAMETER = 15
"""Memory that the largest part takes: float32 parameters, two slots, a copy, and what memcpy copies."""


def jobs(parts: list[str], sizes: list[str]) -> dict[str, tuple[str, ...]]:
    """What is run, by its name in the results: a module of this package and its arguments.

    Raises:
      ValueError: an unknown part or size.
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
    load = os.getloadavg()[0]
    if len(job) > 1:
        needed = SIZES[job[1]].num_parameters * _BYTES_A_PARAMETER
        if (available := available_bytes()) < needed:
            return {"left_out": f"needs {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} are available"}
    try:
        found = child(*job)
        return found.get("values", found) | {"load": load}
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        return {"left_out": str(e), "load": load}


def available_bytes() -> int:
    """Memory that is free or can be made so."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(argv: list[str]) -> None:
    """Runs the parts that were asked for, and tells what all of them found."""
    del argv
    folder = pathlib.Path(_RESULTS.value)
    file = folder / "publish.json"
    parts: dict[str, dict[str, Any]] = json.loads(file.read_text())["parts"] if file.is_file() else {}
    for name, job in jobs(_PARTS.value, _SIZES.value).items():
        parts[name] = run(job)
        print(name, json.dumps(parts[name]), flush=True)
        machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}."
        values = report.values_of(parts)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"bench": "publish", "parts": parts, "values": values}, indent=1) + "\n")
        (folder / "publish.md").write_text(report.page(parts, values, machine))
    values = report.values_of(parts)
    print(json.dumps({"bench": "publish", "values": values, "aims": report.aims_of(values)}))


if __name__ == "__main__":
    app.run(main)
