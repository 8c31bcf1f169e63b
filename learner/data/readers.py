"""Rows of .jsonl, .parquet, .arrayrecord, Hugging Face data sets, by index.

What is kept of a file of lines is where each begins, 8 bytes a row; of a parquet file the columns that are looked at,
as Arrow holds them, and beyond a bound on disk.

The reader is the one that `grain.sources.ArrayRecordDataSource` wraps; it is taken without grain, which loads jax, as
a run's prompts are looked at before anything starts.
"""

import dataclasses
import glob
import json
import mmap
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from array_record.python.array_record_data_source import ArrayRecordDataSource

from configs.extras import install_command
from configs.sections.prompts import HUGGING_FACE, PromptSource

Row = dict[str, Any]


BATCH_ROWS = 4096
"""Rows that are looked at together."""
MAX_TABLE_BYTES = 2**30
"""Columns of a parquet file that are kept in memory; larger ones are unpacked to a file without a name, and mapped."""
_SCAN_BYTES = 2**26


class Rows(Protocol):
    """What a problem is parsed from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row | str | None:
        """Row `index`, counted from 0; or why it can't be read; None for a blank line."""
        ...

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """All of them in order, some at a time."""
        ...


class JsonLines:
    """The lines of a .jsonl file, mapped into memory."""

    def __init__(self, path: pathlib.Path) -> None:
        """Finds where the lines begin.

        Raises:
          OSError: the file can't be read.
        """
        with open(path, "rb") as file:
            is_empty = not file.seek(0, 2)
            self._map = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = _line_starts(self._map)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row | str | None:
        line = self._map[self._starts[index] : self._starts[index + 1]]
        if not line.strip():
            return None
        return decode_json(line)

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """All of them in order, some at a time."""
        for start in range(0, len(self), BATCH_ROWS):
            yield [self[i] for i in range(start, min(start + BATCH_ROWS, len(self)))]


class ArrowRows:
    """The rows of an Arrow table."""

    def __init__(self, table: pyarrow.Table) -> None:
        """`table` may be mapped from a file."""
        self._table = _with_short_floats(table)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row | str | None:
        return _as_given(self._table.slice(index, 1).to_pylist()[0])

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """All of them in order, some at a time."""
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            yield [_as_given(row) for row in batch.to_pylist()]


def read_parquet(path: pathlib.Path, columns: Sequence[str]) -> ArrowRows:
    """A .parquet file's rows, of those columns that it has; or all columns, if the first one, the prompt's, is missing.

    Raises:
      ValueError: it is no parquet file.
    """
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = wanted_columns(file.schema_arrow.names, columns)
        if _num_bytes(file, names) <= MAX_TABLE_BYTES:
            return ArrowRows(file.read(columns=names))
        return ArrowRows(_unpacked(file, names))
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{path} is no parquet file: {e}") from e


def wanted_columns(there: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Returns those of `columns` that exist; all columns if the first is missing, so that an error can list them.

    `image*` in `columns` stands for all that begin so, and `!images` for one that is not wanted.
    """
    if columns[0] not in there:
        return list(there)
    prefixes = tuple(c[:-1] for c in columns if c.endswith("*"))
    return [c for c in there if c in columns or (c.startswith(prefixes) and f"!{c}" not in columns)]


def _with_short_floats(table: pyarrow.Table) -> pyarrow.Table:
    """Returns a table whose columns of 16 and 32 bit floats are float64 of the same shortest digits: 0.1 stays 0.1."""
    for index, field in enumerate(table.schema):
        if pyarrow.types.is_float16(field.type) or pyarrow.types.is_float32(field.type):
            digits = table.column(index).cast(pyarrow.float32()).cast(pyarrow.string())
            table = table.set_column(index, field.name, digits.cast(pyarrow.float64()))
    return table


def decode_json(line: bytes) -> Row | str:
    """A row, or why it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        return f"not JSON: {e}"
    return row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def _as_given(row: Row) -> Row:
    """A row without the nulls that Arrow puts where one object of a list lacks a field that another has."""
    return {name: _without_nulls(value) if isinstance(value, list) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _line_starts(data: mmap.mmap | bytes) -> np.ndarray:
    """Where each line begins, and where the last one ends; int64."""
    found = [np.zeros(1, np.int64)]
    for start in range(0, len(data), _SCAN_BYTES):
        chunk = np.frombuffer(data[start : start + _SCAN_BYTES], np.uint8)
        found.append(np.flatnonzero(chunk == ord("\n")) + (start + 1))
    starts = np.concatenate(found)
    return starts if starts[-1] == len(data) else np.append(starts, len(data))


def _num_bytes(file: pyarrow.parquet.ParquetFile, names: Sequence[str]) -> int:
    """What the columns take unpacked."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns = [g.column(i) for g in groups for i in range(g.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in names)


def _unpacked(file: pyarrow.parquet.ParquetFile, names: list[str]) -> pyarrow.Table:
    """The columns mapped from a file that goes with this process; a row group at a time is in memory."""
    with tempfile.TemporaryFile() as target:
        schema = pyarrow.schema([file.schema_arrow.field(n) for n in names])
        with pyarrow.ipc.new_file(target, schema) as writer:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                writer.write_batch(batch)
        target.flush()
        mapped = pyarrow.memory_map(f"/proc/self/fd/{target.fileno()}")  # stays when the file has no name any more
        return pyarrow.ipc.open_file(mapped).read_all()


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


def load(source: PromptSource, columns: Sequence[str], *, split: str) -> ArrowRows:
    """A split's rows, mapped from the library's own cache.

    Raises:
      ValueError: the library is not installed, there is no such data set or split, or the Hub can't be reached.
    """
    name = source.path.removeprefix(HUGGING_FACE)
    try:
        import datasets  # only where one is used: it is an extra, and loads pandas
    except ImportError as e:
        raise ValueError(
            f"{source.path} needs the library `datasets`: {install_command('huggingface')}, or give a file ({e})"
        ) from e
    try:
        found = datasets.load_dataset(name, source.subset or None, split=split, revision=source.revision or None)
    except Exception as e:  # the library's own, the Hub's and every file format's errors have no base class
        said = " ".join(str(e).split())
        raise ValueError(f"{source.path} (subset {source.subset!r}, split {split!r}) can't be loaded: {said}") from e
    if not isinstance(found, datasets.Dataset):
        raise ValueError(f"{source.path}: split {split!r} gives a {type(found).__name__}, want one split, as `train`")
    kept = found.select_columns(wanted_columns(found.column_names, columns))
    return ArrowRows(kept.with_format("arrow")[:])


def open_rows(source: PromptSource, columns: Sequence[str], *, path: str = "", split: str = "") -> Rows:
    """The rows of a source's file or data set; of its evaluation's with another `path` or `split`.

    Raises:
      ValueError: there is none, or it has another format.
    """
    path = path or source.path
    if path.startswith(HUGGING_FACE):
        return load(dataclasses.replace(source, path=path), columns, split=split or source.split)
    if path.endswith((".arrayrecord", ".array_record")):
        return ArrayRecordRows(path)
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"no prompts file {path!r}")
    if file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompts must be .jsonl, .parquet, .arrayrecord or hf:NAME, got {path!r}")
    return read_parquet(file, columns) if file.suffix == ".parquet" else JsonLines(file)
