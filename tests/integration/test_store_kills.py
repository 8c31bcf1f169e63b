"""Nothing lost, nothing twice: three producers, a learner and the store's server, killed again and again."""

import pathlib

import pytest

from tests.integration.support.store_torture import Outcome, Urls, torture
from tests.postgres import Server, start_server

pytestmark = pytest.mark.integration


@pytest.fixture
def server(postgres: Server, data_folder: pathlib.Path, tmp_path: pathlib.Path):
    """A server of the test's own, since it is killed."""
    server = start_server(data_folder / tmp_path.name)
    yield server
    server.close()


def over_postgres(server: Server, folder: pathlib.Path, *, num_groups: int, kills: int) -> Outcome:
    learner, actor = server.create_store()

    def kill_server() -> None:
        server.kill()
        server.restart()

    return torture(
        Urls(learner=learner, actor=actor),
        folder,
        num_groups=num_groups,
        client_kills=kills,
        server_kills=kills,
        kill_server=kill_server,
    )


def over_sqlite(folder: pathlib.Path, *, num_groups: int, kills: int) -> Outcome:
    url = f"sqlite:///{folder}/store.db"
    return torture(Urls(learner=url, actor=url), folder, num_groups=num_groups, client_kills=kills)


def check(outcome: Outcome) -> None:
    print(outcome)
    assert (outcome.lost, outcome.trained_twice, outcome.trained) == (0, 0, outcome.issued)


def test_kills_of_server_and_clients_lose_nothing_and_train_nothing_twice(server, tmp_path):
    check(over_postgres(server, tmp_path, num_groups=400, kills=4))


def test_kills_of_clients_of_a_file_lose_nothing_and_train_nothing_twice(tmp_path):
    check(over_sqlite(tmp_path, num_groups=300, kills=8))


@pytest.mark.nightly
def test_twenty_kills_over_five_thousand_groups_on_postgres(server, tmp_path):
    check(over_postgres(server, tmp_path, num_groups=5000, kills=20))


@pytest.mark.nightly
def test_twenty_kills_over_five_thousand_groups_on_sqlite(tmp_path):
    check(over_sqlite(tmp_path, num_groups=5000, kills=20))
