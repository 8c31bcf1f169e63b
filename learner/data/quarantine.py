"""The file of rows that were set aside."""

import json
import pathlib
from collections.abc import Iterable

from learner.data.problems import BadRow


def write_quarantine(file: pathlib.Path, bad: Iterable[BadRow]) -> None:
    """Appends set-aside rows to the run's quarantine file, one JSON object a row."""
    with open(file, "a", encoding="utf-8") as out:
        for row in bad:
            out.write(json.dumps({"source": row.path, "row": row.row, "reason": row.reason}) + "\n")
