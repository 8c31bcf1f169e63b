"""What the learner tells actors elsewhere, as they read it from the store."""

import contextlib

from bridge.credentials import Token
from bridge.snapshots.snapshot_format import check_signature
from bridge.store.open import SqliteStore
from learner.run_context import announcer
from tests.bridge.factories import make_announcement

TOKEN = Token("0123456789abcdef" * 2)


def test_announcement_is_signed_where_there_is_a_token_and_plain_where_there_is_none(tmp_path):
    announcement = make_announcement(sources=("https://learner:1/v",))
    got = []
    for token in (TOKEN, None):
        with contextlib.closing(SqliteStore(tmp_path / f"{token is None}.sqlite")) as store:
            announcer(store, token)(announcement)
            got.append(store.announced())
    signed, plain = got
    assert (signed.manifest, signed.sources) == (announcement.manifest, announcement.sources)
    check_signature(signed, TOKEN)
    assert plain == announcement
