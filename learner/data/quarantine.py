"""The files of rows that were set aside: all of them, to be read; and those whose own answers did not pass."""

import json
import pathlib
from collections.abc import Iterable

from bridge.files import replace_file
from learner.data.opening import SetAside
from learner.data.problems import BadRow


def write_quarantine(file: pathlib.Path, bad: Iterable[BadRow]) -> None:
    """Appends set-aside rows to the run's quarantine file, one JSON object a row."""
    with open(file, "a", encoding="utf-8") as out:
        for row in bad:
            out.write(json.dumps({"source": row.path, "row": row.row, "reason": row.reason}) + "\n")


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
