"""Logins in a PostgreSQL store's URL: detection of secrets and replacement of the user.

libpq reads the same settings from the part before the host and from the query. The query takes precedence.
"""

import re
import urllib.parse

_SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""libpq parameters whose values are secrets."""
_LEARNERS_FILES = ("passfile", "sslcert", "sslkey", "sslcertmode")
"""libpq parameters that name the files of one login."""
_POSTGRES = re.compile(r"^postgres(?:ql)?(?:\+\w+)?://", re.IGNORECASE)
_HOST = r"(?:\[[^\]]*\]|[^:@/?,\[]*)(?::\d*)?"
_HOSTS = re.compile(rf"^{_HOST}(?:,{_HOST})*/")
"""Hosts with ports, up to the database: libpq looks for a login only before the first "/"."""


def secret_in(url: str) -> str | None:
    """Returns the name of the first secret parameter in a store's URL; None if there is none.

    A password with an unescaped "/" or "?", which libpq would read as part of a host, also counts.
    """
    scheme = _POSTGRES.match(url)
    if scheme is None:
        return None
    rest = url[scheme.end() :]
    before_host, at, _ = rest.partition("@")
    if at and ":" in before_host and not _HOSTS.match(before_host):
        return "password"
    return next((name for name, _ in _query(url) if name in _SECRETS), None)


def files_of_a_login(url: str) -> list[str]:
    """Returns the parameters of a store's URL that name files of one login, such as a client certificate."""
    return [name for name, _ in _query(url) if name in _LEARNERS_FILES]


def users_of(url: str) -> list[str]:
    """Returns all users that a store's URL names; libpq uses the last."""
    before_host = urllib.parse.urlsplit(url).netloc.rpartition("@")[0].partition(":")[0]
    users = [urllib.parse.unquote(before_host)] if before_host else []
    return users + [value for name, value in _query(url) if name == "user"]


def with_user(url: str, user: str) -> str:
    """Returns a store's URL with its user replaced."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "&".join(pair for pair in parts.query.split("&") if _name(pair) != "user")
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{urllib.parse.quote(user, safe='')}@{host}", query=query))


def _query(url: str) -> list[tuple[str, str]]:
    """Returns names and values after the first "?", as libpq splits and decodes them."""
    pairs = url.partition("?")[2].split("&")
    return [(_name(pair), urllib.parse.unquote(pair.partition("=")[2])) for pair in pairs if pair]


def _name(pair: str) -> str:
    return urllib.parse.unquote(pair.partition("=")[0]).strip().lower()
