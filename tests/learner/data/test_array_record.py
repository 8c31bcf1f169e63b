import json

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from learner.data import readers
from learner.data.readers import ArrayRecordRows


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
    with pytest.raises(ValueError, match="is not an ArrayRecord file"):
        ArrayRecordRows(str(tmp_path / "x.arrayrecord"))
