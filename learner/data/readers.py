"""Row readers by index: .jsonl, .parquet and .arrayrecord files, and Hugging Face data sets.

A .jsonl file keeps only line offsets in memory, 8 bytes per row. A parquet file keeps the needed columns as Arrow data,
in memory up to `MAX_TABLE_BYTES` and else on disk. ArrayRecord files use the reader behind
`grain.sources.ArrayRecordDataSource`, without grain, which loads jax: prompts are checked before anything starts.
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

from configs.sections.prompts import HUGGING_FACE, PromptSource
from configs.suggestions import install_command

Row = dict[str, Any]


BATCH_ROWS = 4096
"""Rows per batch of a scan."""
MAX_TABLE_BYTES = 2**30
"""Maximum in-memory size of a parquet file's columns; larger ones are unpacked to an unnamed temporary file and
mapped."""
_SCAN_BYTES = 2**26


class Rows(Protocol):
    """Rows of a source, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row | str | None:
        """Returns row `index` from 0, the reason why it is unreadable, or None for a blank line."""
        ...

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """Yields all rows, in the order of their index, as batches."""
        ...


class JsonLines:
    """Lines of a .jsonl file, mapped into memory."""

    def __init__(self, path: pathlib.Path) -> None:
        """Finds the line offsets; raises OSError if the file is unreadable."""
        with open(path, "rb") as file:
            is_empty = not file.seek(0, 2)
            self._map = None if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = _line_starts(self._map or b"")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row | str | None:
        assert self._map is not None, "an empty file has no rows"
        if self._map.size() < len(self._map):  # of the file; reading beyond its end would kill the process
            return "the file has become shorter; to replace it, write a new file and rename that"
        line = self._map[self._starts[index] : self._starts[index + 1]]
        if not line.strip():
            return None
        return decode_json(line)

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """Yields all rows as batches."""
        for start in range(0, len(self), BATCH_ROWS):
            yield [self[i] for i in range(start, min(start + BATCH_ROWS, len(self)))]


class ArrowRows:
    """Rows of an Arrow table."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = _with_short_floats(table)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row | str | None:
        return _as_given(self._table.slice(index, 1).to_pylist()[0])

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """Yields all rows as batches."""
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            yield [_as_given(row) for row in batch.to_pylist()]


def read_parquet(path: pathlib.Path, columns: Sequence[str]) -> ArrowRows:
    """Returns the rows of a .parquet file with the columns of `wanted_columns`, or raises ValueError."""
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = wanted_columns(file.schema_arrow.names, columns)
        if _num_bytes(file, names) <= MAX_TABLE_BYTES:
            return ArrowRows(file.read(columns=names))
        return ArrowRows(_unpacked(file, names))
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{path} is not a parquet file: {e}") from e


def wanted_columns(there: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Returns the existing ones of `columns`; all columns if the first is missing, so that an error can list them.

    `image*` in `columns` matches all columns with the prefix, and `!images` excludes a column.
    """
    if columns[0] not in there:
        return list(there)
    prefixes = tuple(c[:-1] for c in columns if c.endswith("*"))
    return [c for c in there if c in columns or (c.startswith(prefixes) and f"!{c}" not in columns)]


def _with_short_floats(table: pyarrow.Table) -> pyarrow.Table:
    """Returns a table with float16 and float32 columns as float64 of the same shortest digits: 0.1 stays 0.1."""
    for index, field in enumerate(table.schema):
        if pyarrow.types.is_float16(field.type) or pyarrow.types.is_float32(field.type):
            digits = table.column(index).cast(pyarrow.float32()).cast(pyarrow.string())
            table = table.set_column(index, field.name, digits.cast(pyarrow.float64()))
    return table


def decode_json(line: bytes) -> Row | str:
    """Returns a row, or the reason why the line is invalid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        return f"not JSON: {e}"
    return row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def _as_given(row: Row) -> Row:
    """Returns a row without the nulls that Arrow adds for fields that only other objects of a list have."""
    return {name: _without_nulls(value) if isinstance(value, list) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _line_starts(data: mmap.mmap | bytes) -> np.ndarray:
    found = [np.zeros(1, np.int64)]
    for start in range(0, len(data), _SCAN_BYTES):
        chunk = np.frombuffer(data[start : start + _SCAN_BYTES], np.uint8)
        found.append(np.flatnonzero(chunk == ord("\n")) + (start + 1))
    starts = np.concatenate(found)
    return starts if starts[-1] == len(data) else np.append(starts, len(data))


def _num_bytes(file: pyarrow.parquet.ParquetFile, names: Sequence[str]) -> int:
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns = [g.column(i) for g in groups for i in range(g.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in names)


def _unpacked(file: pyarrow.parquet.ParquetFile, names: list[str]) -> pyarrow.Table:
    """Returns the columns mapped from a temporary file that this process owns; unpacks them batch by batch."""
    with tempfile.TemporaryFile() as target:
        schema = pyarrow.schema([file.schema_arrow.field(n) for n in names])
        with pyarrow.ipc.new_file(target, schema) as writer:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                writer.write_batch(batch)
        target.flush()
        # the mapping survives the unnamed file's descriptor
        mapped = pyarrow.memory_map(f"/proc/self/fd/{target.fileno()}")
        return pyarrow.ipc.open_file(mapped).read_all()


class ArrayRecordRows:
    """Records of all files that match a pattern, in order of file names."""

    def __init__(self, pattern: str) -> None:
        """Reads the file indices; raises ValueError if no file matches or one is not an ArrayRecord file."""
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise ValueError(f"no prompts file {pattern!r}")
        try:
            self._source = ArrayRecordDataSource(paths)
            self._num_rows = len(self._source)
        except (RuntimeError, ValueError, OSError) as e:
            raise ValueError(f"{pattern} is not an ArrayRecord file: {e}") from e

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row | str | None:
        return decode_json(self._source[index])

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """Yields all rows as batches."""
        for start in range(0, len(self), BATCH_ROWS):
            indices = range(start, min(start + BATCH_ROWS, len(self)))
            yield [decode_json(record) for record in self._source.__getitems__(indices)]


def load(source: PromptSource, columns: Sequence[str], *, split: str) -> ArrowRows:
    """Returns the rows of a Hugging Face data set split, mapped from the library's cache.

    Raises ValueError if `datasets` is not installed, the data set or split does not exist, or the Hub is unreachable.
    """
    name = source.path.removeprefix(HUGGING_FACE)
    try:
        import datasets  # imported on use: it is an optional extra and loads pandas
    except ImportError as e:
        raise ValueError(
            f"{source.path} needs the library `datasets`: {install_command('huggingface')}, or give a file ({e})"
        ) from e
    try:
        found = datasets.load_dataset(name, source.subset or None, split=split, revision=source.revision or None)
    except Exception as e:  # errors of the library, the Hub and file formats share no base class
        said = " ".join(str(e).split())
        raise ValueError(f"{source.path} (subset {source.subset!r}, split {split!r}) cannot be loaded: {said}") from e
    if not isinstance(found, datasets.Dataset):
        raise ValueError(
            f"{source.path}: split {split!r} gives a {type(found).__name__}, expected one split such as `train`"
        )
    kept = found.select_columns(wanted_columns(found.column_names, columns))
    return ArrowRows(kept.with_format("arrow")[:])


def open_rows(source: PromptSource, columns: Sequence[str], *, path: str = "", split: str = "") -> Rows:
    """Opens the source's file or data set, or raises ValueError. `path` and `split` select the evaluation rows."""
    path = path or source.path
    if path.startswith(HUGGING_FACE):
        if path != source.path:  # its subsets and revisions have other names
            source = dataclasses.replace(source, path=path, subset="", revision="", split="train")
        return load(source, columns, split=split or source.split)
    if path.endswith((".arrayrecord", ".array_record")):
        return ArrayRecordRows(path)
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"no prompts file {path!r}")
    if file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompts must be .jsonl, .parquet, .arrayrecord or hf:NAME, got {path!r}")
    return read_parquet(file, columns) if file.suffix == ".parquet" else JsonLines(file)
