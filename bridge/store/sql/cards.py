"""A run's card, and the files that it names: what an actor elsewhere must have before it serves."""

from collections.abc import Mapping

import blake3
from typing_extensions import override

from bridge.published import RunCard
from bridge.store.protocol import GroupStore
from bridge.store.sql.shared import SqlShared


class SqlCards(SqlShared, GroupStore):
    """One card a run, put by its learner, and small files by their hashes."""

    @override
    def put_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        for hash_, content in blobs.items():
            _check_blob(hash_, content)
        put = "INSERT INTO blobs (run, blake3, content) VALUES (:run, :blake3, :content) ON CONFLICT DO NOTHING"
        self._write(
            self._step(
                """INSERT INTO cards (run, payload) VALUES (:run, :payload)
                ON CONFLICT (run) DO UPDATE SET payload = excluded.payload""",
                payload=self._encode(card),
            ),
            self._step("DELETE FROM blobs WHERE run = :run AND NOT blake3 IN [kept]", kept=list(blobs)),
            before_lock=[self._step(put, blake3=h, content=c) for h, c in blobs.items()],
            guarded=True,
        )

    @override
    def card(self) -> RunCard | None:
        rows = self._read("SELECT payload FROM cards WHERE run = :run")
        return self._decode(RunCard, rows[0][0]) if rows else None

    @override
    def blob(self, blake3: str) -> bytes:
        rows = self._read("SELECT content FROM blobs WHERE run = :run AND blake3 = :blake3", blake3=blake3)
        if not rows:
            raise KeyError(f"the store has no file of hash {blake3}")
        (content,) = rows[0]
        _check_blob(blake3, content)
        return content


def _check_blob(hash_: str, content: bytes) -> None:
    """Refuses bytes of another hash.

    Raises:
      ValueError: they were changed on their way or where they lay.
    """
    if blake3.blake3(content).hexdigest() != hash_:
        raise ValueError(f"the file of hash {hash_} has another one: it was changed; start the learner again")
