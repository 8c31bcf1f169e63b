"""Whether an actor may trust what a store's URL leads to, looked at before anything is asked of it."""

from bridge.secrets import TOKEN_FILE, Token
from bridge.store.open import sqlite_path
from bridge.store.postgres.way import parse, way_of
from bridge.store.url_login import secret_in
from configs.schema import Config


def check_trust(url: str, token: Token | None) -> None:
    """Refuses to serve a run elsewhere whose weights nobody vouches for, and a password that everyone may read.

    Raises:
      ValueError: says what to set.
    """
    check_no_password(url)
    if token is None and sqlite_path(url) is None and not way_of(url).is_here:
        raise ValueError(
            f"a run of another machine needs its token, by which its weights are known: set {TOKEN_FILE} to a file "
            "with it"
        )


def allowing(config: Config) -> list[str]:
    """Flags by which an actor may import the code that a config names, for whoever has it before him and starts one."""
    return [f"--allow_module={name}" for name in (*config.own_verifiers, *config.own_environments)]


def check_no_password(url: str) -> None:
    """Refuses a URL of the command line that holds a password.

    Raises:
      ValueError: it does, or is no store's.
    """
    if sqlite_path(url) is None and (secret_in(url) or not {"password", "sslpassword"}.isdisjoint(parse(url))):
        raise ValueError("--store holds a password, and every user of this machine sees it; use PGPASSFILE, PGPASSWORD")
