"""Secrets and users in a store's URL; libpq's own reading is the oracle where it reads the URL at all."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from bridge.store.url_login import secret_in, users_of, with_user
from configs.sections.run import StoreConfig
from launch.tools.deploy.deployment import store_of_actors
from tests.launch.tools.deploy.cases import config

SECRET = "hunter2"
WITH_A_SECRET = [
    f"postgresql://a:{SECRET}@h/db",
    f"postgresql://a:{SECRET}@h1:5432,h2:5433/db?sslmode=verify-full",
    f"postgres://a:{SECRET}@[::1]:5432/db",
    f"postgresql://a:12{SECRET}@h/db",
    f"postgresql://h/db?user=a&password={SECRET}&sslmode=verify-full",
    f"postgresql://a@h/db?sslpassword={SECRET}&sslmode=verify-full",
    f"postgresql:///db?host=h&user=a&password={SECRET}",
    f"postgresql://a@h/db?pass%77ord={SECRET}",
    f"postgresql://a@h?password={SECRET}",
    f"postgresql://a:{SECRET}@/db?host=/var/run",
    f"postgresql://a:x?{SECRET}@h/db",
    f"postgresql://a:,{SECRET}@h/db",
    f"postgresql://a:2024,{SECRET}@h/db",
    f"postgresql://a:1234?{SECRET}@h/db",
]
UNREADABLE = [
    f"postgresql://a@h/db?sslmode=verify-full&&password={SECRET}",
    f"postgresql://a:{SECRET}/x@h/db",
    f"postgresql://a:{SECRET}/x?y@h/db?sslmode=verify-full",
    f"postgresql://a@h/db?PASSWORD={SECRET}",
    f"postgresql://a@h/db?oauth_client_secret={SECRET}",
    f"postgresql+psycopg://a:{SECRET}@h/db",
]
WITHOUT = [
    "",
    "sqlite:///run/store.sqlite",
    "sqlite:///run/password=x",
    "postgresql://a@h:5432/db?sslmode=verify-full",
    "postgresql://h:5432/db?application_name=me@here",
    "postgresql://a@h1:5432,h2:5433/db?target_session_attrs=read-write",
    "postgresql://h1:5432,h2:5433/db?application_name=me@here",
    "postgresql://[::1]:5432/db?application_name=me@here",
    "postgresql://a@h/password?application_name=password",
    "postgresql://a%3Ab@h/db",
    "postgresql:///db?host=h&user=a",
]


@pytest.mark.parametrize("url", WITH_A_SECRET + UNREADABLE)
def test_secret_in_a_stores_url_is_refused_and_not_repeated(url):
    assert secret_in(url)
    with pytest.raises(ValueError, match=r"store\.url ") as refused:
        StoreConfig(url=url)
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("url", WITH_A_SECRET)
def test_secret_is_found_where_libpq_finds_one(url):
    given = conninfo_to_dict(url)
    assert SECRET in str(given.get("password", "")) + str(given.get("sslpassword", ""))


@pytest.mark.parametrize("url", WITHOUT)
def test_url_without_a_secret_is_taken(url):
    assert secret_in(url) is None
    if url.startswith("postgresql"):
        assert not {"password", "sslpassword"} & conninfo_to_dict(url).keys()
    StoreConfig(url=url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://learner@db.example/sluice?sslmode=verify-full",
        "postgresql://db.example/sluice?user=learner&sslmode=verify-full",
        "postgresql://x@db.example/sluice?user=learner&sslmode=verify-full",
        "postgresql://db.example/sluice?sslmode=verify-full&us%65r=learner&user=learner",
        "postgresql://learner@h1:5432,h2:5433/sluice?user=learner&sslmode=verify-full",
    ],
)
def test_actors_log_in_as_themselves_wherever_the_url_names_the_learner(url):
    before, after = conninfo_to_dict(url), conninfo_to_dict(store_of_actors(config(store__url=url), "an actor"))
    assert after == before | {"user": "an actor"}
    assert users_of(with_user(url, "actor")) == ["actor"]


@pytest.mark.parametrize(
    ("url", "user", "says"),
    [
        ("postgresql://learner@db.example/sluice?sslmode=verify-full&sslcert=/k/a.pem", "actor", "sslcert"),
        ("postgresql://learner@db.example/sluice?sslmode=verify-full&sslkey=/k/a.key", "actor", "sslkey"),
        ("postgresql://learner@db.example/sluice?sslmode=verify-full&passfile=/k/pgpass", "actor", "passfile"),
        ("postgresql://learner@db.example/sluice?sslmode=verify-full", "learner", "--actor_user=learner is the"),
        ("postgresql://db.example/sluice?sslmode=verify-full&user=learner", "learner", "--actor_user=learner is the"),
        ("postgresql://a%20b@db.example/sluice?sslmode=verify-full", "a b", "--actor_user=a b is the"),
    ],
)
def test_learners_login_is_not_rendered_for_actors(url, user, says):
    with pytest.raises(ValueError, match=says):
        store_of_actors(config(store__url=url), user)
