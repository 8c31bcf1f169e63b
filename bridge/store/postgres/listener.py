"""Hears what changed in a run (LISTEN): a thread with a connection of its own, so that nobody has to ask."""

import hashlib
import os
import random
import select
import threading
import time
from collections.abc import Collection

import psycopg
from absl import logging
from psycopg import sql

from bridge.store.postgres.connections import Connection, Connections, cut
from bridge.store.postgres.errors import reason_of
from bridge.store.protocol import TOPICS, Mark, Topic

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


def channel_of(run: str) -> str:
    """The channel on which a run's changes are told; their payload is the topic."""
    return f"sluice_{hashlib.blake2b(run.encode(), digest_size=16).hexdigest()}"


class Listener:
    """Counts the changes of one run's topics."""

    def __init__(self, connections: Connections, run: str) -> None:
        """Begins to listen at once; what happens before it can is counted as a change of everything."""
        self._connections, self._run = connections, run
        self._changed = threading.Condition()
        self._counts: dict[Topic, int] = dict.fromkeys(TOPICS, 0)
        self._is_closed = False
        self._connection: Connection | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="store-listener", daemon=True)
        self._thread.start()

    def mark(self) -> Mark:
        """How often each topic has changed."""
        with self._changed:
            return dict(self._counts)

    def wait(self, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        """Returns when one of `topics` has changed since `mark`, at `close`, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or any(self._counts[t] != mark[t] for t in topics), timeout_s
            )

    def close(self) -> None:
        """Lets go of whoever waits."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            connection = self._connection
        os.write(self._wake_write, b"x")
        if connection is not None:
            cut(connection)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _listen(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            began_s = time.monotonic()
            try:
                self._listen_once()
            except (psycopg.Error, OSError, RuntimeError, ValueError) as e:
                if self._is_closed:
                    return
                why = reason_of(e) if isinstance(e, psycopg.Error) else type(e).__name__
                logging.log_every_n_seconds(logging.WARNING, "the store's changes are not heard: %s", 30, why)
            if time.monotonic() - began_s > 2 * _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            select.select([self._wake_read], [], [], pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _listen_once(self) -> None:
        with self._connections.connect() as connection:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel_of(self._run))))
            with self._changed:
                self._connection = connection
            self._count(TOPICS)  # whatever happened before this moment
            while not self._is_closed:
                select.select([connection.fileno(), self._wake_read], [], [])
                self._count({n.payload for n in connection.notifies(timeout=0) if n.payload in TOPICS})

    def _count(self, topics: Collection[Topic]) -> None:
        with self._changed:
            for topic in topics:
                self._counts[topic] += 1
            self._changed.notify_all()
