"""Runs benches one after another, and writes docs/results.md and its figure from the stored results.

python -m tests.bench.all NAME...     runs these benches, then writes page and figure
python -m tests.bench.all --report    writes these only
"""

import subprocess
import sys
from typing import Any

from absl import app, flags

from tests.bench.harness import figure, page
from tests.bench.harness.benches import BENCHES, SECTIONS, Bench
from tests.bench.harness.code import PROJECT
from tests.bench.harness.estimates import mean
from tests.bench.headlines import HEADLINES, Headline

_REPORT = flags.DEFINE_bool("report", False, "Writes docs/results.md and its figure only.")
PAGE = PROJECT / "docs" / "results.md"
FIGURE = PAGE.with_name("images") / "headlines.png"
_HEAD = """---
title: Results
description: One row per benchmark with its question, main number, hardware, date and commit.
status: measured
---
# Results

<!-- made by python -m tests.bench.all --report -->
Each row links a benchmark result, with its caveats and all of its numbers. *CPU* means 2 cores (x86_64). *Outdated*
results were measured on older code: they claim nothing about this version (`tests/bench/README.md` has the commands).

## Headlines of the papers

Numbers of the papers, ours with the 95% interval, and the opponent. Missed aims stay in the table with their reason.
"""


def markdown() -> str:
    """Returns docs/results.md."""
    columns = {c: f"{{{c}}}" for c in ("Headline", "Paper", "Ours", "Opponent", "Met")}
    parts = [_HEAD + "\n" + page.table(columns, [_headline_row(h) for h in HEADLINES])]
    parts.append(f"![Headlines and presets](images/{FIGURE.name})")
    columns = {c: f"{{{c}}}" for c in ("Result", "Question", "Main number", "Hardware", "Date, commit")}
    for section, benches in SECTIONS.items():
        rows = [_bench_row(bench) for bench in benches if bench.made or bench.stored() is not None]
        parts.append(f"## {section}\n\n{page.table(columns, rows)}")
    return "\n\n".join(parts) + "\n<!-- end -->\n"


def _bench_row(bench: Bench) -> dict[str, str]:
    whole = bench.stored()
    is_outdated, made, main = bench.is_outdated(whole), bench.made, bench.main
    if whole is not None and "values" in whole:
        made = f"{whole['made'][:10]}, {whole['commit']}"
        try:
            main = bench.main.format_map(whole["values"])
        except KeyError:  # a value that the bench has had since
            if not is_outdated:
                raise
            main = "-"
    return {
        "Result": f"[{bench.name}](../tests/bench/results/{bench.name}.md)",
        "Question": bench.question,
        "Main number": f"Outdated: {main}" if is_outdated else main,
        "Hardware": bench.hardware,
        "Date, commit": made,
    }


def _headline_row(headline: Headline) -> dict[str, str]:
    whole = _fresh(headline.bench)
    row = {"Headline": headline.name, "Paper": headline.paper, "Opponent": headline.opponent}
    if whole is None or (value := whole["values"].get(headline.key)) is None:
        return row | {"Ours": "-", "Met": "not measured on this code"}
    aim = whole["aims"][headline.key]
    reason = f"; {headline.reason}" if headline.reason and not aim["met"] else ""
    ours = page.number(value) + page.interval(aim.get("interval"))
    return row | {"Ours": ours, "Met": f"{page.met(aim)}{reason}"}


def panels() -> dict[str, list[figure.Point]]:
    """Returns what the figure shows: headlines by unit, and each preset's late held-out reward less serial's."""
    found: dict[str, list[figure.Point]] = {}
    for headline in HEADLINES:
        if (whole := _fresh(headline.bench)) is not None and headline.key in whole["aims"]:
            value, aim = whole["values"][headline.key], whole["aims"][headline.key]
            point = figure.Point(headline.name, value, aim.get("interval"), aim["aim"], aim["met"])
            found.setdefault(headline.unit, []).append(point)
    values = (_fresh("presets") or {"values": {}})["values"]
    for key in sorted(k for k in values if k.endswith("_minus_serial")):
        preset = key.removesuffix("_minus_serial")
        seeds = [k.removeprefix("late_serial_") for k in values if k.startswith("late_serial_")]
        each = mean([values[f"late_{preset}_{s}"] - values[f"late_serial_{s}"] for s in seeds])
        point = figure.Point(preset, each.value, (each.low, each.high), 0.0, each.high >= 0.0)
        found.setdefault("late held-out reward less serial's", []).append(point)
    return found


def _fresh(name: str) -> dict[str, Any] | None:
    """Returns a bench's stored result, or None if there is none of this code."""
    whole = BENCHES[name].stored()
    return None if whole is None or BENCHES[name].is_outdated(whole) else whole


def main(argv: list[str]) -> None:
    names = argv[1:]
    if unknown := sorted(set(names) - BENCHES.keys()):
        raise app.UsageError(f"{', '.join(unknown)}: expected names of benches: {', '.join(BENCHES)}")
    if not names and not _REPORT.value:
        raise app.UsageError("expected names of benches, or --report")
    failed = []
    for name in [] if _REPORT.value else names:
        module = f"tests.bench.{(BENCHES[name].module or name).removesuffix('.py').replace('/', '.')}"
        print(f"== {module}", flush=True)
        if subprocess.run([sys.executable, "-m", module], cwd=PROJECT).returncode != 0:
            failed.append(name)
    PAGE.write_text(markdown())
    figure.points(FIGURE, panels())
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    app.run(main)
