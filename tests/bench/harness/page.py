"""The page of a bench, made of its JSON alone: `python -m tests.bench.harness.page NAME...` writes pages again."""

import json
import pathlib
import statistics
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class _Cells(string.Formatter):
    """Formats a row's fields: a list of numbers as mean ± standard deviation, what is missing as "-"."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if isinstance(value, list | tuple) and value and format_spec:
            mean = format(statistics.fmean(value), format_spec)
            return mean if len(value) == 1 else f"{mean} ± {format(statistics.stdev(value), format_spec)}"
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value)) or "-"
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
        return format(value, format_spec) if not isinstance(value, bool) else "yes" if value else "no"


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table: a cell is its column's format (`"{seconds:.2f}"`), filled from the row's fields."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    cells = _Cells()
    lines += [f"| {' | '.join(cells.vformat(cell, (), row) for cell in columns.values())} |" for row in rows]
    return "\n".join(lines)


def number(value: float | Sequence[float] | None) -> str:
    """Returns a value or the bounds of an aim."""
    if isinstance(value, list | tuple):
        return " to ".join(map(number, value))
    return "-" if value is None else f"{value:.3g}"


def markdown(whole: Mapping[str, Any]) -> str:
    """Returns the page of a result."""
    title, _, about = whole["doc"].strip().partition("\n")
    machine = whole["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    first, last = machine["load"]
    changes = " with changes" if whole.get("modified") else ""
    made = (
        f"Made {whole['made']} at commit {whole['commit']}{changes} on {machine['cores']} cores "
        f"({machine['architecture']}), {versions}; {machine['beside']}. {machine['wall_s']:.0f} s; load average "
        f"{first:.1f} at the start, {last:.1f} at the end."
    )
    parts = [f"# {title.rstrip('.')}", about.strip("\n"), made]
    if whole["columns"]:
        parts.append(table(whole["columns"], whole["rows"]))
    parts += whole["notes"]
    if whole["aims"]:
        parts.append(_aims(whole["aims"]))
    if whole["figure"]:
        parts.append(f"![{title.rstrip('.')}]({whole['bench']}.png)")
    return "\n\n".join(part for part in parts if part) + "\n"


def _aims(aims: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        {
            "name": name,
            "value": number(aim["value"]) + interval(aim.get("interval")),
            "bound": number(aim["aim"]) if isinstance(aim["aim"], list) else _bound(aim),
            "met": "no: chosen in sight" if aim["chosen_in_sight"] else met(aim),
            "source": aim["source"],
        }
        for name, aim in aims.items()
    ]
    columns = {
        "aim": "`{name}`",
        "value (95% interval)": "{value}",
        "wanted": "{bound}",
        "met": "{met}",
        "source": "{source}",
    }
    return table(columns, rows)


def met(aim: Mapping[str, Any]) -> str:
    """Returns if an aim was met, and if its value's interval leaves a doubt."""
    if not aim["met"]:
        return "no"
    return "yes" if aim.get("certain", True) else "yes, within the error"


def interval(bounds: Sequence[float | None] | None) -> str:
    """Returns "" without an interval: of one measurement, or of a number that is no estimate."""
    return "" if bounds is None or None in bounds else f" ({number(bounds[0])} to {number(bounds[1])})"


def _bound(aim: Mapping[str, Any]) -> str:
    return f"{'>=' if aim['at_least'] else '<='} {number(aim['aim'])}"


def main(names: Sequence[str]) -> None:
    folder = pathlib.Path(__file__).resolve().parents[1] / "results"
    for name in names:
        whole = json.loads((folder / f"{name}.json").read_text())
        if "doc" not in whole:
            raise SystemExit(f"{name}.json is of before pages were made of it; run python -m tests.bench.{name}")
        (folder / f"{name}.md").write_text(markdown(whole))


if __name__ == "__main__":
    main(sys.argv[1:])
