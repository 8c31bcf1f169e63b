"""Classification of PostgreSQL errors.

Transient errors are retried. All others need an administrator or a configuration fix.
"""

import psycopg

_HEALING_CLASSES = (
    "08",  # connection
    "40",  # serialization failure, deadlock
    "53",  # disk full, out of memory, too many connections
    "57",  # shutdown, crash, startup, statement timeout
)
_HEALING_STATES = (
    "25P03",  # idle-in-transaction timeout
    "25P04",  # transaction timeout
    "25006",  # a standby: the URL does not lead to the new primary yet
    "55P03",  # lock timeout
)
# A server that rejects a connection gives only a text. These texts mean transient conditions.
_FULL_WORDS = ("too many", "remaining connection slots")
_HEALING_WORDS = ("starting up", "shutting down", "recovery", "not yet accepting connections", *_FULL_WORDS)
# Part of what libpq or the server says -> what to do about it.
_ADVICE = (
    ("password authentication failed", "give the right password in PGPASSFILE or PGPASSWORD"),
    ("no password supplied", "give its password in PGPASSFILE or PGPASSWORD"),
    ("no pg_hba.conf entry", "have the server's administrator let this role in from here (pg_hba.conf)"),
    (
        "certificate verify failed",
        "is it the right server? sslrootcert names the certificate of whoever signed its own",
    ),
    ("server certificate for", "the host in the URL must be one that the server's certificate names"),
    ("root certificate file", "name it with ?sslrootcert=FILE (PEM), or sslrootcert=system"),
    ("certificate", "sslcert and sslkey name this client's, sslrootcert whom it trusts (PEM files)"),
    ("does not support SSL", "the server has no TLS; turn it on there, or use sslmode=disable on loopback"),
    ("SSL error", "do both sides speak TLS? see sslmode"),
    ("private key file", "sslkey names a file that only its owner may read"),
    ("role", "have an administrator make it"),
    ("database", "have an administrator make it (CREATE DATABASE)"),
    ("not known", "is the host in the URL right?"),
    ("sslmode", "it is one of disable, require, verify-ca, verify-full"),
    ("", "see the URL"),
)


def heals(error: BaseException) -> bool:
    """Returns True if an error on an established connection is transient."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InternalError):
        return False
    state = error.sqlstate
    return state is None or state.startswith(_HEALING_CLASSES) or state in _HEALING_STATES


def connecting_heals(error: psycopg.Error) -> bool:
    """Returns True if a failed connection attempt may succeed later without any configuration change."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    text = str(error)
    if any(words in text for words in _HEALING_WORDS):
        return True
    refused = ("FATAL:", "certificate", "SSL", "private key", "not known", "invalid")
    # A connection that broke during the TLS handshake says nothing about certificates.
    cut = ("SSL SYSCALL error", "SSL connection has been closed", "server closed the connection")
    return any(words in text for words in cut) or not any(words in text for words in refused)


def is_full(error: psycopg.Error) -> bool:
    """Returns True if the server, or the limit of this role or database, allows no more connections."""
    refused = isinstance(error, psycopg.OperationalError) and "FATAL" in str(error)
    return refused and any(words in str(error) for words in _FULL_WORDS)


def explain(error: psycopg.Error, *, place: str) -> str:
    """Returns one line on why a server cannot be used and how to fix it; `place` is the URL without its password."""
    reason = reason_of(error)
    advice = next(advice for words, advice in _ADVICE if words in reason)
    return f"{place} can't be used: {reason}; {advice}"


def reason_of(error: psycopg.Error) -> str:
    """Returns the cause of an error in one line."""
    # libpq reports each address of a host, and with `prefer` each mode, on its own line. Hints are indented.
    said = error.diag.message_primary or str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(("\t", "- "))]
    refusals = [line for line in lines if "FATAL" in line]
    reason = (refusals or lines or [type(error).__name__])[-1]
    if "lock timeout" in reason:
        reason += ": a session keeps this run locked; an administrator ends it (pg_locks, pg_terminate_backend)"
    if is_full(error):
        reason += (
            ": raise max_connections there (or the role's or database's CONNECTION LIMIT) to 2 for each actor and "
            "learner and 10 more (docs/kubernetes.md)"
        )
    return reason.removeprefix("connection failed: ").removeprefix("connection is bad: ")
