"""Whether the engines that serve have places for a race (RollPacker section 3), wherever they are."""

from absl import logging

from bridge.store.protocol import LIVE_S, LearnerStore
from bridge.types import Heartbeat
from configs.races import num_racing, too_few_places
from configs.schema import Config


class RacePlaces:
    """Looks once a round, and says so when the engines are too few; once for each number of places."""

    def __init__(self, config: Config, store: LearnerStore) -> None:
        """Nothing was said yet."""
        self._config, self._store = config, store
        self._said: int | None = None

    def look(self) -> str | None:
        """What is said now, if anything. Nothing while engines start: more places are on their way."""
        if num_racing(self._config) is None:
            return None
        since_s = self._store.now_s() - LIVE_S
        live = [b for b in self._store.heartbeats() if b.role == "actor" and b.time_s > since_s]
        sizes = _places(live)
        if sizes is None or sum(sizes) == self._said:
            return None
        self._said = sum(sizes)
        shortage = too_few_places(
            self._config,
            num_engines=len(sizes),
            max_num_seqs=self._config.actor.max_num_seqs,
            num_places=sum(sizes),
        )
        if shortage is not None:
            logging.warning("%s", shortage)
        return shortage


def _places(live: list[Heartbeat]) -> list[int] | None:
    """Of each engine that serves; None if none does, or one is still starting."""
    reports = [b.report for b in live]
    serving = [r.max_sequences for r in reports if r is not None and not r.is_leaving]
    return None if None in reports else serving or None
