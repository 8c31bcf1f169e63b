import json

import hypothesis.strategies as st
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import HealthCheck, given, settings

from learner.data import readers
from learner.data.readers import ArrayRecordRows, JsonLines, read_parquet
from tests.learner.data.rooms import jsonl, parquet

COLUMNS = ("prompt", "answer")


def all_of(found):
    return [row for batch in found.batches() for row in batch]


def one_by_one(found):
    return [found[i] for i in range(len(found))]


def test_json_lines_blank_lines_are_none_and_count(tmp_path):
    found = JsonLines(tmp_path / jsonl(tmp_path, [{"a": 1}, "", "  \t", "{torn", "[1, 2]", {"a": "ä"}]))
    got = one_by_one(found)
    assert got[0] == {"a": 1} and got[1] is None and got[2] is None and got[5] == {"a": "ä"}
    assert "not JSON" in str(got[3]) and got[4] == "not a JSON object but list"
    assert all_of(found) == got


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=5), max_size=30),
    ends=st.booleans(),
    scan=st.integers(1, 40),
    batch=st.integers(1, 7),
)
def test_json_lines_are_the_files_lines_wherever_chunks_end(tmp_path, texts, ends, scan, batch):
    lines = [json.dumps({"t": t}) for t in texts]
    file = tmp_path / "readers.jsonl"
    file.write_bytes(("\n".join(lines) + ("\n" if ends and lines else "")).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_SCAN_BYTES", scan)
        patch.setattr(readers, "BATCH_ROWS", batch)
        found = JsonLines(file)
        assert one_by_one(found) == all_of(found) == [{"t": t} for t in texts]


def test_json_lines_bytes_that_are_no_utf8_are_a_reason(tmp_path):
    file = tmp_path / "readers.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "x"}')
    assert isinstance(JsonLines(file)[0], str) and JsonLines(file)[1] == {"prompt": "x"}


def test_json_lines_of_a_file_that_became_shorter_are_a_reason(tmp_path):
    file = tmp_path / "readers.jsonl"
    file.write_text('{"a": 1}\n' * 10_000)
    found = JsonLines(file)
    file.write_text('{"a": 1}\n' * 10)
    assert "has become shorter" in str(found[9_000])


@pytest.mark.parametrize("max_bytes", [0, 2**30])
def test_read_parquet_rows_are_the_columns_that_are_looked_at(tmp_path, monkeypatch, max_bytes):
    monkeypatch.setattr(readers, "MAX_TABLE_BYTES", max_bytes)  # 0: unpacked to a file and mapped
    made = [{"prompt": [{"role": "user", "content": f"q{n}"}], "answer": n, "other": "x" * 9} for n in range(50)]
    found = read_parquet(tmp_path / parquet(tmp_path, made, row_group_size=7), COLUMNS)
    want = [{k: v for k, v in row.items() if k in COLUMNS} for row in made]
    assert len(found) == 50 and one_by_one(found) == all_of(found) == want


def test_read_parquet_unpacks_only_what_is_over_the_bound(tmp_path, monkeypatch):
    file = tmp_path / parquet(
        tmp_path, [{"prompt": "x" * 100, "answer": str(n), "big": f"{n}" * 999} for n in range(9)]
    )
    unpacked = []
    monkeypatch.setattr(readers, "_unpacked", lambda file, names: unpacked.append(names) or file.read(columns=names))
    monkeypatch.setattr(readers, "MAX_TABLE_BYTES", 4000)  # the column that nobody looks at is larger
    read_parquet(file, COLUMNS)
    assert unpacked == []
    read_parquet(file, ("prompt", "answer", "big"))
    assert unpacked == [["prompt", "answer", "big"]]


def test_read_parquet_without_a_prompt_column_gives_all_so_that_they_can_be_named(tmp_path):
    found = read_parquet(tmp_path / parquet(tmp_path, [{"question": "x", "answer": 1}]), COLUMNS)
    assert found[0] == {"question": "x", "answer": 1}


def test_read_parquet_of_another_file_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="is not a parquet file"):
        read_parquet(tmp_path / "x.parquet", COLUMNS)


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32()])
def test_parquet_short_floats_keep_their_digits(tmp_path, kind):
    answers = pyarrow.array([0.5, 3.0, None, 0.1], pyarrow.float32()).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list("abcd"), "answer": answers}), tmp_path / "t.parquet")
    found = all_of(read_parquet(tmp_path / "t.parquet", COLUMNS))
    tenth = 0.1 if kind == pyarrow.float32() else float(np.float32(np.float16(0.1)))
    assert [row["answer"] for row in found if isinstance(row, dict)] == [
        0.5,
        3.0,
        None,
        pytest.approx(tenth, abs=0 if tenth == 0.1 else 1e-6),
    ]


def write(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


@pytest.mark.parametrize("record", [b"{torn", b"", b"\xc1", b"\x0a\xff\xff"])
def test_array_record_that_is_not_json_gives_the_reason(tmp_path, record):
    write(tmp_path / "rows.arrayrecord", [b'{"prompt": "1+1"}', record])
    good, bad = ArrayRecordRows(str(tmp_path / "rows.arrayrecord")).batches().__next__()
    assert good == {"prompt": "1+1"} and "not JSON" in str(bad)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:16"])
def test_array_record_rows_are_the_records_in_order(tmp_path, monkeypatch, options):
    monkeypatch.setattr(readers, "BATCH_ROWS", 7)
    made = [{"prompt": f"q{n}", "answer": n} for n in range(40)]
    write(tmp_path / "rows.arrayrecord", [json.dumps(r).encode() for r in made], options)
    found = ArrayRecordRows(str(tmp_path / "rows.arrayrecord"))
    assert one_by_one(found) == all_of(found) == made


def test_array_record_rows_of_a_pattern_are_those_of_all_files_by_name(tmp_path):
    for shard in (1, 0):
        write(tmp_path / f"rows-{shard:05d}.arrayrecord", [json.dumps({"n": 2 * shard + i}).encode() for i in (0, 1)])
    found = ArrayRecordRows(str(tmp_path / "rows-*.arrayrecord"))
    assert one_by_one(found) == [{"n": n} for n in range(4)]


def test_array_record_file_that_is_missing_or_another_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts file"):
        ArrayRecordRows(str(tmp_path / "none.arrayrecord"))
    (tmp_path / "x.arrayrecord").write_text("something else")
    with pytest.raises(ValueError, match="is not an ArrayRecord file"):
        ArrayRecordRows(str(tmp_path / "x.arrayrecord"))
