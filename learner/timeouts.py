"""The anchors of adaptive timeouts (RollPacker, section 4.3) in the learner's books, so that they outlive the store.

They are measurements, and part of no update: what the store knows from after the checkpoint that a learner goes back to
stays there.
"""

import itertools
from collections.abc import Generator, Mapping
from typing import Any

from absl import logging

from bridge.store.protocol import LearnerStore

FIELD = "timeout_anchors"
"""Of the books: {task's key: seconds by test case, with spaces between them}. Not there where there are none."""
TASKS_A_PAGE = 512
MAX_BYTES = 64 * 2**20
"""Of a checkpoint's anchors; 100,000 tasks of 20 test cases take a quarter of it."""
_PATIENCE_S = 5.0
"""For how long a store that is away holds up a checkpoint."""


class TimeoutAnchors:
    """One learner's: taken along in each checkpoint, and put back into a store that lacks them."""

    def __init__(self, store: LearnerStore, *, max_bytes: int = MAX_BYTES) -> None:
        """Asks nothing yet."""
        self._store, self._max_bytes = store, max_bytes
        self._known: dict[str, str] = {}
        """As of the last checkpoint. Texts: numbers of Python's own would take several times as much."""

    def books(self) -> dict[str, Any]:
        """Their part of a checkpoint; JSON, and empty where there are none. As of the last one if the store is away."""
        try:
            self._known = self._stored()
        except TimeoutError as e:
            logging.warning("anchors saved as they were known before num_tasks=%d: %s", len(self._known), e)
        return {FIELD: self._known} if self._known else {}

    def resume(self, books: Mapping[str, Any] | None) -> None:
        """Puts those of a checkpoint into the store, if it lacks them; nothing if there is none, or it has none."""
        saved: dict[str, str] = (books or {}).get(FIELD, {})
        if not saved:
            return
        stored = self._stored()
        lacking = iter([key for key, text in saved.items() if stored.get(key) != text])
        num_put = 0
        while page := list(itertools.islice(lacking, TASKS_A_PAGE)):
            self._store.put_anchors({key: _seconds(saved[key]) for key in page})
            num_put += len(page)
        self._known = stored | saved
        logging.info("anchors restored num_tasks=%d put_back=%d", len(saved), num_put)

    def _stored(self) -> dict[str, str]:
        """All that the store has, up to the bound: whoever may write them shall fill neither memory nor disk."""
        found: dict[str, str] = {}
        num_bytes = 0
        for key, seconds in self._pages():
            text = " ".join(map(repr, seconds))
            num_bytes += len(key) + len(text)
            if num_bytes > self._max_bytes:
                logging.warning("anchors of more than %d bytes; num_tasks=%d are saved", self._max_bytes, len(found))
                break
            found[key] = text
        return found

    def _pages(self) -> Generator[tuple[str, tuple[float, ...]]]:
        last = ""
        while page := self._store.all_anchors(after=last, limit=TASKS_A_PAGE, patience_s=_PATIENCE_S):
            yield from page.items()
            last = next(reversed(page))


def _seconds(text: str) -> list[float]:
    return [float(s) for s in text.split(" ")]
