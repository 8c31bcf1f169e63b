"""What actors are told of a version: its manifest and all the sources that have it."""

import threading
from collections.abc import Callable, Sequence

from bridge.weight_types import Announcement, WeightManifest


class SourceAnnouncer:
    """Announces versions, newest first, with the sources that have them; of the leader alone. Any thread may call."""

    def __init__(self, send: Callable[[Announcement], None] | None) -> None:
        """`send` is called by one thread at a time; None: nothing is announced."""
        self._send = send
        self._lock = threading.Lock()
        self._last: Announcement | None = None
        self._host_sources: tuple[tuple[str, ...], ...] = ()
        """Sources of the last version, for each host's piece."""
        self._own_sources: tuple[str, ...] = ()
        """Sources of the last version."""
        self._slow_sources: tuple[str, ...] = ()
        """Where slow destinations put a version last, be it that one or an older one."""

    def announce(
        self,
        manifest: WeightManifest,
        sources: Sequence[str],
        *,
        host_sources: tuple[tuple[str, ...], ...] = (),
        is_slow: bool = False,
    ) -> None:
        """Announces a version, or more sources of it; an older one than was announced only beside that one.

        So a bucket whose uploads take longer than until the next version still gives something new to who reaches it
        alone.
        """
        if self._send is None:
            return
        with self._lock:
            last, own, of_hosts = self._last, tuple(sources), host_sources
            if is_slow:
                self._slow_sources = own
            if last is not None and last.manifest.version > manifest.version:
                if not is_slow:
                    return
                manifest, own, of_hosts = last.manifest, self._own_sources, self._host_sources
            elif last is not None and last.manifest.version == manifest.version:
                own, of_hosts = _joined(self._own_sources, own), of_hosts or self._host_sources
            self._own_sources, self._host_sources = own, of_hosts
            self._last = Announcement(
                manifest=manifest, sources=_joined(own, self._slow_sources), host_sources=of_hosts
            )
            self._send(self._last)


def _joined(first: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    return (*first, *(s for s in more if s not in first))
