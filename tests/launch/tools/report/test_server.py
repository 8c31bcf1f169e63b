"""`--serve`: on loopback, for nobody else, and anew when the run has gone on."""

import http.client
import threading
from collections.abc import Iterator

import pytest

from launch.tools.report import server as served
from launch.tools.report.server import make_server
from tests.launch.tools.report.folder import make_folder


@pytest.fixture
def clock(monkeypatch):
    """What time the server thinks it is."""
    now = [0.0]
    monkeypatch.setattr(served.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def run(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(served, "MIN_AGE_S", 0.0)
    return make_folder(tmp_path / "run", steps=4)


@pytest.fixture
def port(run) -> Iterator[int]:
    with make_server([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port, path="/", *, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_server_listens_on_loopback_alone(run):
    with make_server([run], port=0) as server:
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.heavy
def test_page_names_its_version_and_a_run_that_goes_on_has_another(run, port):
    status, page = ask(port)
    version = ask(port, "/version")[1]
    assert status == 200 and f'data-follow="{version}"' in page
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 5, "reward/mean": 0.5}\n')
    newer = ask(port, "/version")[1]
    assert newer != version
    page = ask(port)[1]
    assert f'data-follow="{newer}"' in page and "5 of 4" in page
    (run / "evaluated").mkdir()
    (run / "evaluated" / "5-1.json").write_text('{"format": 1, "model": "m", "sets": []}')
    assert ask(port, "/version")[1] != newer


@pytest.mark.heavy
def test_run_that_writes_events_alone_has_another_version_now_and_then(run, port, clock):
    version = ask(port, "/version")[1]
    with open(run / "events" / "actor-0.jsonl", "a") as file:
        file.write('{"name": "begin", "ph": "i", "ts": 1.7e15, "args": {}}\n')
    clock[0] = served.EVENTS_EVERY_S - 1
    assert ask(port, "/version")[1] == version
    clock[0] = served.EVENTS_EVERY_S
    assert ask(port, "/version")[1] != version


@pytest.mark.heavy
def test_what_nobody_thought_of_is_said_in_a_line(port, monkeypatch):
    def build(folders, **kwargs):
        raise AttributeError("it broke\nin two lines")

    monkeypatch.setattr(served, "build", build)
    assert ask(port) == (500, "cannot build the report: AttributeError: it broke in two lines")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("/report.html", {}, 404),
        ("/../../etc/passwd", {}, 404),
        ("/", {"Host": "evil.example:80"}, 403),
        ("/version", {"Host": "evil.example"}, 403),
        ("/version", {"Host": "localhost:1"}, 200),
    ],
)
def test_server_answers_its_two_pages_under_its_own_name_alone(port, path, headers, status):
    assert ask(port, path, **headers)[0] == status


@pytest.mark.heavy
def test_server_only_shows(port):
    assert ask(port, "/", method="POST")[0] == 501


@pytest.mark.heavy
def test_run_that_vanished_is_said_and_the_server_lives(run, port):
    ask(port)
    (run / "config.json").unlink()
    (run / "summary.json").unlink()
    assert ask(port) == (500, f"{run}: expected a run folder, got no config.json in it")
    assert ask(port, "/version")[0] == 200


@pytest.mark.heavy
def test_taken_port_and_no_run_folder_are_refused(run, port, tmp_path):
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
        make_server([run], port=port)
    with pytest.raises(ValueError, match="expected a run folder"):
        make_server([tmp_path / "nothing"], port=0)
