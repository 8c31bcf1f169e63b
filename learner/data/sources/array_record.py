"""ArrayRecord files, grain's own format: records by number, each a row as JSON.

The reader is the one that `grain.sources.ArrayRecordDataSource` wraps; it is taken without grain, which loads jax, as
a run's prompts are looked at before anything starts.
"""

import glob
from collections.abc import Iterator, Sequence

from array_record.python.array_record_data_source import ArrayRecordDataSource

from learner.data.sources.rows import BATCH_ROWS, Row, decode_json


class ArrayRecordRows:
    """The records of one file, or of all that a pattern finds, in the order of their names."""

    def __init__(self, pattern: str) -> None:
        """Reads the files' indices.

        Raises:
          ValueError: no such file, or it is no ArrayRecord file.
        """
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise ValueError(f"no prompts file {pattern!r}")
        try:
            self._source = ArrayRecordDataSource(paths)
            self._num_rows = len(self._source)
        except (RuntimeError, ValueError, OSError) as e:
            raise ValueError(f"{pattern} is no ArrayRecord file: {e}") from e

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row | str | None:
        return decode_json(self._source[index])

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """All of them in order, some at a time."""
        for start in range(0, len(self), BATCH_ROWS):
            indices = range(start, min(start + BATCH_ROWS, len(self)))
            yield [decode_json(record) for record in self._source.__getitems__(indices)]
