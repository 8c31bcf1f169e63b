import json

import msgspec
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from learner.data.sources import array_record
from learner.data.sources.array_record import ArrayRecordRows, decode


def write(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def proto(number, payload):
    """A length-delimited protobuf field, written by hand."""
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


def example(**features):
    """A tf.train.Example: text as a BytesList, whole numbers as an Int64List."""
    entries = b""
    for name, value in features.items():
        kind = proto(1, proto(1, value.encode())) if isinstance(value, str) else proto(3, proto(1, bytes([value])))
        entries += proto(1, proto(1, name.encode()) + proto(2, kind))
    return proto(1, entries)


ROW = {"prompt": "1+1", "answer": 2}


@pytest.mark.parametrize(
    "record",
    [json.dumps(ROW).encode(), b' \n{"prompt": "1+1", "answer": 2}', msgspec.msgpack.encode(ROW), example(**ROW)],
)
def test_decode_reads_json_msgpack_and_examples(record):
    assert decode(record) == ROW


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"{torn", "not JSON"),
        (b"", "neither JSON, msgpack"),
        (b"\xc1", "neither JSON, msgpack"),
        (msgspec.msgpack.encode([1]), "not a map but list"),
        (b"\x0a\xff\xff", "no tf.train.Example"),
    ],
)
def test_decode_of_anything_else_gives_the_reason(record, said):
    assert said in str(decode(record))


@pytest.mark.parametrize("options", ["group_size:1", "group_size:16"])
def test_array_record_rows_are_the_records_in_order(tmp_path, monkeypatch, options):
    monkeypatch.setattr(array_record, "BATCH_ROWS", 7)
    made = [{"prompt": f"q{n}", "answer": n} for n in range(40)]
    write(tmp_path / "rows.arrayrecord", [json.dumps(r).encode() for r in made], options)
    found = ArrayRecordRows(str(tmp_path / "rows.arrayrecord"))
    assert [found[i] for i in range(len(found))] == made
    assert [row for batch in found.batches() for row in batch] == made


def test_array_record_rows_of_a_pattern_are_those_of_all_files_by_name(tmp_path):
    for shard in (1, 0):
        write(tmp_path / f"rows-{shard:05d}.arrayrecord", [json.dumps({"n": 2 * shard + i}).encode() for i in (0, 1)])
    found = ArrayRecordRows(str(tmp_path / "rows-*.arrayrecord"))
    assert [found[i] for i in range(len(found))] == [{"n": n} for n in range(4)]


def test_array_record_file_that_is_missing_or_another_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts file"):
        ArrayRecordRows(str(tmp_path / "none.arrayrecord"))
    (tmp_path / "x.arrayrecord").write_text("something else")
    with pytest.raises(ValueError, match="is no ArrayRecord file"):
        ArrayRecordRows(str(tmp_path / "x.arrayrecord"))
