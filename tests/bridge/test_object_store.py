"""Places that hold objects: what opening one makes, and which are this machine's."""

import obstore
import pytest

from bridge.object_store import is_of_this_machine, open_source


def test_reader_of_a_folder_that_is_not_there_makes_none(tmp_path):
    url = (tmp_path / "a b" / "bucket").as_uri()
    with pytest.raises(FileNotFoundError, match="a b/bucket: no such folder"):
        open_source(url)
    assert list(tmp_path.iterdir()) == []


def test_writer_makes_its_folder_and_a_reader_then_reads_it(tmp_path):
    url = (tmp_path / "a b" / "bucket").as_uri()
    obstore.put(open_source(url, is_written=True), "x", b"1")
    assert bytes(obstore.get(open_source(url), "x").bytes()) == b"1"


@pytest.mark.parametrize(
    ("url", "is_"),
    [
        ("file:///folder", True),
        ("http://127.0.0.1:1/v", True),
        ("https://localhost/v", True),
        ("https://[::1]:8443/v", True),
        ("https://127.0.0.1.example/v", False),
        ("https://10.0.0.1/v", False),
        ("https:///v", False),
        ("s3://localhost/v", False),
        ("gs://bucket/v", False),
    ],
)
def test_place_of_this_machine_is_a_folder_or_a_server_on_loopback(url, is_):
    assert is_of_this_machine(url) == is_
