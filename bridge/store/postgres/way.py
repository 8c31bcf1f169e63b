"""The way to a PostgreSQL server, as libpq will really go it: by the URL, and by the environment in what it leaves out.

PGHOST, PGHOSTADDR, PGSSLMODE and a service's file (PGSERVICE) lead elsewhere as well as a URL does; whether a server is
on this machine, and whether the connection proves that it is the right one, is looked at here and nowhere else.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bridge.buckets import is_loopback


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Where connections of a URL go."""

    place: str
    """Which database, without any secret."""
    hosts: tuple[str, ...]
    """All that are tried: addresses, names, sockets' folders; empty: the socket that libpq was built with."""
    sslmode: str
    """libpq's."""

    @property
    def is_here(self) -> bool:
        """Whether all of them are this machine's: loopback or a socket."""
        return all(not host or host.startswith(("/", "@")) or is_loopback(host) for host in self.hosts)


def parse(url: str) -> dict[str, Any]:
    """What a URL says, by libpq's own reading.

    Raises:
      ValueError: it is none of PostgreSQL's.
    """
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as e:
        # What libpq says may quote a part of the password.
        parameter = re.search(r'invalid URI query parameter: "(\w+)"', str(e))
        raise ValueError(
            "the store's URL can't be read; it is postgresql://user@host:port/database?sslmode=verify-full, with "
            f"%XX for what is special{f'; {parameter[1]} is no parameter' if parameter else ''}"
        ) from None
    if "service" in given:
        raise ValueError("the store's URL names a service; give host and sslmode in it, or the service by PGSERVICE")
    return given


def way_of(url: str) -> Way:
    """Where connections of a URL would go from here, now.

    Raises:
      ValueError: it is none of PostgreSQL's.
    """
    given = parse(url)
    # The environment and its service's file, as libpq merges them; then what it was built with.
    defaults = {o.keyword.decode(): (o.val or b"").decode() for o in psycopg.pq.Conninfo.get_defaults()}
    settings: dict[str, Any] = {**defaults, **given}
    # An address in the list goes before the name at its place; one left out leaves the name.
    addresses, names = (f"{settings.get(k) or ''}".split(",") for k in ("hostaddr", "host"))
    hosts = tuple(a.strip() or n.strip() for a, n in itertools.zip_longest(addresses, names, fillvalue=""))
    return Way(place_of(given), hosts, f"{settings.get('sslmode') or ''}")


def check_encrypted(way: Way) -> None:
    """Refuses a server on another machine that would be talked to without TLS, or without proof that it is the one.

    `prefer`, which libpq takes by itself, anybody between may talk out of TLS.

    Raises:
      ValueError: says what to add.
    """
    if not way.is_here and way.sslmode != "verify-full":
        raise ValueError(
            f"{way.place} is on another machine, and sslmode={way.sslmode} does not prove that it is the right "
            "server: add ?sslmode=verify-full, and name whoever signed its certificate by PGSSLROOTCERT"
        )


def place_of(given: Mapping[str, Any]) -> str:
    """Which database, without any secret."""
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}"
