"""What went wrong between us and a PostgreSQL server: what heals by itself, and what somebody has to mend."""

import psycopg

_HEALING_CLASSES = (
    "08",  # connection
    "40",  # serialization failure, deadlock
    "53",  # disk full, out of memory, too many connections
    "57",  # shutdown, crash, starting up, a statement's time is over
)
_HEALING_STATES = (
    "25P03",  # idle in a transaction for too long
    "25P04",  # a transaction took too long
    "25006",  # a standby: the server that took its place is not yet where we connect
    "55P03",  # a lock was not to be had in time
)
# A server that refuses a connection says so in words only. Of these it will think better.
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
    """Whether to try again after an error of a connection that had worked."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InternalError):
        return False
    state = error.sqlstate
    return state is None or state.startswith(_HEALING_CLASSES) or state in _HEALING_STATES


def connecting_heals(error: psycopg.Error) -> bool:
    """Whether a connection that could not be made may be made a little later, as long as nobody changes anything."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    text = str(error)
    if any(words in text for words in _HEALING_WORDS):
        return True
    refused = ("FATAL:", "certificate", "SSL", "private key", "not known", "invalid")
    # A connection that was cut while TLS began is no matter of certificates.
    cut = ("SSL SYSCALL error", "SSL connection has been closed", "server closed the connection")
    return any(words in text for words in cut) or not any(words in text for words in refused)


def is_full(error: psycopg.Error) -> bool:
    """Whether the server, or what it lets this role or database have, takes no more connections."""
    refused = isinstance(error, psycopg.OperationalError) and "FATAL" in str(error)
    return refused and any(words in str(error) for words in _FULL_WORDS)


def explain(error: psycopg.Error, *, place: str) -> str:
    """One line on why a server can't be used, and what to do; `place` is the URL without its password."""
    reason = reason_of(error)
    advice = next(advice for words, advice in _ADVICE if words in reason)
    return f"{place} can't be used: {reason}; {advice}"


def reason_of(error: psycopg.Error) -> str:
    """What went wrong, in one line."""
    # libpq tries each address of a host, and with `prefer` each way, and says so on a line each; hints are indented.
    said = error.diag.message_primary or str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(("\t", "- "))]
    refusals = [line for line in lines if "FATAL" in line]
    reason = (refusals or lines or [type(error).__name__])[-1]
    if "lock timeout" in reason:
        reason += ": a session keeps this run locked; an administrator ends it (pg_locks, pg_terminate_backend)"
    if is_full(error):
        reason += (
            ": raise max_connections there (or the role's or database's CONNECTION LIMIT) to 2 for each actor and "
            "learner and 10 more (docs/deploy.md)"
        )
    return reason.removeprefix("connection failed: ").removeprefix("connection is bad: ")
