"""Announcements of a version: its manifest and all sources that have it."""

import threading
from collections.abc import Callable, Sequence

from bridge.weight_types import Announcement, WeightManifest


class SourceAnnouncer:
    """Leader's announcements of versions and their sources, newest version first; thread-safe."""

    def __init__(self, send: Callable[[Announcement], None] | None) -> None:
        """Creates an announcer. `send` is called by one thread at a time; with None it announces nothing."""
        self._send = send
        self._lock = threading.Lock()
        self._last: Announcement | None = None
        self._host_sources: tuple[tuple[str, ...], ...] = ()
        """Sources of the last announced version, for each host's piece."""
        self._own_sources: tuple[str, ...] = ()
        """Sources of the last announced version."""
        self._slow_sources: tuple[str, ...] = ()
        """Sources in which slow destinations last stored a version, which may be older than the last announced one."""

    def announce(
        self,
        manifest: WeightManifest,
        sources: Sequence[str],
        *,
        host_sources: tuple[tuple[str, ...], ...] = (),
        is_slow: bool = False,
    ) -> None:
        """Announces a version, or further sources of it.

        An older version from a slow destination is added as a source of the last announced version. Actors that reach
        only a slow bucket thereby still receive new weights.
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
