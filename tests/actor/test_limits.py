"""The limits file: what is read, what is refused, and when it is read again."""

import pytest

from actor.elastic_control import EngineSizeFile, EngineSizeOverride

DEFAULT = EngineSizeOverride(max_num_seqs=64, tensor_parallel_size=1)


def make(tmp_path, text: str | None = None) -> EngineSizeFile:
    path = tmp_path / "limits" / "actor-0.json"
    if text is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return EngineSizeFile(path, default=DEFAULT, max_tensor_parallel_size=4)


def test_absent_file_means_the_default_and_is_no_change(tmp_path):
    assert make(tmp_path).read() == DEFAULT and make(tmp_path).read_if_changed() is None


def test_what_is_left_out_is_the_default(tmp_path):
    assert make(tmp_path, '{"max_num_seqs": 16}').read() == EngineSizeOverride(max_num_seqs=16, tensor_parallel_size=1)
    assert make(tmp_path, '{"tensor_parallel_size": 4}').read() == EngineSizeOverride(
        max_num_seqs=64, tensor_parallel_size=4
    )


def test_written_limits_are_read_once_for_each_change(tmp_path):
    file, limits = make(tmp_path), EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=2)
    file.write(limits)
    assert file.read_if_changed() == limits and file.read_if_changed() is None
    file.write(DEFAULT)
    assert file.read_if_changed() == DEFAULT
    assert [p.name for p in file.path.parent.iterdir()] == ["actor-0.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"max_num_seqs": 16', "expected {"),
        ('{"max_num_seqs": "many"}', "Expected `int"),
        ('{"max_seqs": 16}', "max_seqs"),
        ("[]", "expected {"),
        ("\xff", "expected {"),
        ('{"max_num_seqs": 0}', "max_num_seqs must be >= 1, got 0"),
        ('{"tensor_parallel_size": 8}', "between 1 and 4 .*got 8"),
    ],
)
def test_bad_file_is_refused_in_one_line(tmp_path, text, says):
    file = make(tmp_path, text)
    with pytest.raises(ValueError, match=says) as refused:
        file.read_if_changed()
    assert str(file.path) in str(refused.value) and "\n" not in str(refused.value)
    assert file.read_if_changed() is None  # said once


def test_refused_file_is_put_aside(tmp_path):
    file = make(tmp_path, '{"max_num_seqs": 16}')
    assert file.refuse() and file.refused_path.is_file() and file.read() == DEFAULT
    assert not file.refuse()
