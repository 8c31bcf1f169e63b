"""What actors elsewhere learn of a run: its versions, its card, small files by their hashes."""

import blake3
import pytest

from tests.bridge.factories import as_plain, make_announcement, make_run_card, make_ticket
from tests.bridge.store.engines import rows


def test_announced_is_the_newest_and_an_older_one_is_refused(store):
    assert store.announced() is None
    for incarnation, step in ((0, 4), (0, 5), (1, 4)):
        announcement = make_announcement(incarnation=incarnation, step=step, sources=(f"https://h/{step}",))
        store.announce(announcement)
        assert as_plain(store.announced()) == as_plain(announcement)
    for incarnation, step in ((0, 9), (1, 3)):
        with pytest.raises(ValueError, match=f"{incarnation}:{step} is older than 1:4"):
            store.announce(make_announcement(incarnation=incarnation, step=step))
    assert as_plain(store.announced()) == as_plain(announcement)


def test_version_announced_again_is_found_in_more_places(store):
    for sources in (("https://h/4",), ("https://h/4", "s3://b/4")):
        store.announce(make_announcement(incarnation=1, step=4, sources=sources))
        assert store.announced().sources == sources


def test_announcement_is_decoded_again_only_after_it_changed(store):
    for step in (4, 5):
        store.announce(make_announcement(step=step))
        first = store.announced()
        assert first.manifest.version.step == step and store.announced() is first


def test_card_and_its_files_come_back_as_they_were_put(store):
    assert store.run_card() is None
    contents = [b"{}", b"\0" * 3_000_000]
    blobs = {blake3.blake3(c).hexdigest(): c for c in contents}
    card = make_run_card(files=blobs)
    store.put_run_card(card, blobs)
    assert as_plain(store.run_card()) == as_plain(card)
    assert [store.blob(h) for h in blobs] == contents


def test_card_put_again_takes_the_place_of_the_old_one(store):
    old, kept, new = ({blake3.blake3(c).hexdigest(): c} for c in (b"old", b"kept", b"new"))
    store.put_run_card(make_run_card(files=old | kept), old | kept)
    store.put_run_card(make_run_card(name="again", files=kept | new), kept | new)
    assert store.run_card().name == "again"
    assert [store.blob(h) for h in kept | new] == [b"kept", b"new"]
    with pytest.raises(KeyError, match=next(iter(old))):
        store.blob(next(iter(old)))


def test_file_of_another_hash_refused_when_put_and_when_read(store):
    hash_ = blake3.blake3(b"right").hexdigest()
    with pytest.raises(ValueError, match=hash_):
        store.put_run_card(make_run_card(), {hash_: b"wrong"})
    store.put_run_card(make_run_card(), {hash_: b"right"})
    rows(store, "UPDATE blobs SET content = :content WHERE run = :run", content=b"wrong")
    with pytest.raises(ValueError, match=hash_):
        store.blob(hash_)


def test_announcements_and_cards_are_no_tickets(store):
    store.put_tickets([make_ticket("a")])
    store.announce(make_announcement())
    store.put_run_card(make_run_card(), {})
    assert store.counts()["open"] == 1
