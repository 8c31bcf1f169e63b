"""ArrayRecord files, grain's own format: records by number, each a row as JSON, msgpack or tf.train.Example.

The reader is the one that `grain.sources.ArrayRecordDataSource` wraps; it is taken without grain, which loads jax, as
a run's prompts are looked at before anything starts.
"""

import functools
import glob
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from array_record.python.array_record_data_source import ArrayRecordDataSource
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from learner.data.sources.rows import BATCH_ROWS, Row, decode_json

_LENGTH_DELIMITED_FIELD_1 = 0x0A
"""What every tf.train.Example with a feature begins with; no JSON object and no msgpack map does."""


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
        return decode(self._source[index])

    def batches(self) -> Iterator[Sequence[Row | str | None]]:
        """All of them in order, some at a time."""
        for start in range(0, len(self), BATCH_ROWS):
            indices = range(start, min(start + BATCH_ROWS, len(self)))
            yield [decode(record) for record in self._source.__getitems__(indices)]


def decode(record: bytes) -> Row | str:
    """A record's row, or why it is none."""
    if record[:1] == bytes([_LENGTH_DELIMITED_FIELD_1]):
        return _decode_example(record)
    if record.lstrip()[:1] == b"{":
        return decode_json(record)
    try:
        row = msgspec.msgpack.decode(record)
    except (msgspec.DecodeError, RecursionError) as e:
        return f"neither JSON, msgpack nor a tf.train.Example: {e}"
    return row if isinstance(row, dict) else f"not a map but {type(row).__name__}"


def _decode_example(record: bytes) -> Row | str:
    try:
        example = _example_class().FromString(record)
        return {name: _value(feature) for name, feature in example.features.feature.items()}
    except (message.DecodeError, UnicodeDecodeError) as e:
        return f"no tf.train.Example: {e}"


def _value(feature: Any) -> Any:
    """A feature's only value, or the list of them; bytes are text."""
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    values = [v.decode() if isinstance(v, bytes) else v for v in values]
    return values[0] if len(values) == 1 else values or None


@functools.cache
def _example_class() -> Any:
    """tf.train.Example without tensorflow, from its published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="sluice/example.proto", package="sluice", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    kinds = {"BytesList": field.TYPE_BYTES, "FloatList": field.TYPE_FLOAT, "Int64List": field.TYPE_INT64}
    for name, kind in kinds.items():
        made = file.message_type.add(name=name)
        made.field.add(name="value", number=1, label=field.LABEL_REPEATED, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(kinds, start=1):
        feature.field.add(
            name=name.lower(),
            number=number,
            label=field.LABEL_OPTIONAL,
            type=field.TYPE_MESSAGE,
            type_name=f".sluice.{name}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=field.LABEL_OPTIONAL, type=field.TYPE_MESSAGE, type_name=".sluice.Feature"
    )
    features.field.add(
        name="feature",
        number=1,
        label=field.LABEL_REPEATED,
        type=field.TYPE_MESSAGE,
        type_name=".sluice.Features.FeatureEntry",
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_MESSAGE, type_name=".sluice.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sluice.Example"))
