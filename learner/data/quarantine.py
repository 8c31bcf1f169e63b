"""The files of rows that were set aside: all of them, to be read; and those whose own answers did not pass."""

import json
import pathlib
from typing import Any

from absl import logging

from bridge.files import replace_file
from learner.data.opening import SetAside
from learner.data.problems import BadRow


class Quarantine:
    """The run's file of set-aside rows, one JSON object a row; each is written once, also over restarts."""

    def __init__(self, file: pathlib.Path) -> None:
        """Reads which rows are there."""
        self._file = file
        self._there = {(line["source"], line["row"]) for line in _lines(file)}

    def add(self, *bad: BadRow) -> None:
        """Appends those that are not there yet."""
        new = [row for row in bad if (row.path, row.row) not in self._there]
        if not new:
            return
        self._there |= {(row.path, row.row) for row in new}
        with open(self._file, "a", encoding="utf-8") as out:
            for row in new:
                out.write(json.dumps({"source": row.path, "row": row.row, "reason": row.reason}) + "\n")
        logging.warning("rows set aside count=%d see=%s", len(new), self._file)


def _lines(file: pathlib.Path) -> list[dict[str, Any]]:
    """All but a line that a kill tore."""
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def write_set_aside(file: pathlib.Path, set_aside: SetAside) -> None:
    """Keeps what `read_set_aside` gives, for every start of the run."""
    text = json.dumps({source: {str(row): why for row, why in rows.items()} for source, rows in set_aside.items()})
    replace_file(file, text.encode())


def read_set_aside(file: pathlib.Path) -> SetAside:
    """Reasons by source and row; none where nobody looked.

    Raises:
      ValueError: the file is none of ours.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        return {source: {int(row): str(why) for row, why in rows.items()} for source, rows in found.items()}
    except (ValueError, AttributeError) as e:
        raise ValueError(
            f"{file} does not say which rows are set aside: {e}; remove it, and set the run up anew"
        ) from e
