"""Where tickets, groups and heartbeats are kept."""

import dataclasses

from bridge.store.url_login import secret_in
from configs.checks import Count, Seconds, check_ranges
from configs.paths import LocalPath, expand_home


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Where tickets, groups and heartbeats are kept."""

    url: LocalPath = ""
    """postgresql://user@host/database?sslmode=verify-full where actors run on other machines; empty: a SQLite file in
    the run's folder, also written sqlite:///FILE. A password comes from PGPASSFILE or PGPASSWORD, never from here."""
    bucket: LocalPath = ""
    """s3://..., gs://... or file://... for groups larger than inline_bytes; empty: they stay in the database."""
    inline_bytes: Count = 4 * 2**20
    """Size of a group from which on it goes to the bucket, where there is one."""
    actor_role: str = "sluice_actor"
    """PostgreSQL role that may serve this run: a login of the actors, or a group of such."""
    lead_s: Seconds = 30.0
    """A learner elsewhere may take the run over after this one has been silent for so long."""
    retry_s: Seconds = 600.0
    """How long a store that can't be reached is tried again before a process gives up and ends."""

    def __post_init__(self) -> None:
        expand_home(self)
        check_ranges("store", self)
        if secret := secret_in(self.url):
            raise ValueError(
                f"store.url holds a {secret}, and the config is kept in files; use PGPASSFILE or PGPASSWORD"
            )
        shown = self.url.partition("://")[0]  # the rest may hold a secret
        if self.url and not self.url.startswith(("sqlite:///", "postgresql://", "postgres://")):
            raise ValueError(f"store.url must be sqlite:///FILE or postgresql://..., got {shown!r}")
