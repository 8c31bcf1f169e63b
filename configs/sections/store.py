"""Where tickets, groups and heartbeats are kept."""

import dataclasses

from bridge.store.url_login import secret_in
from configs.checks import positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Where tickets, groups and heartbeats are kept."""

    url: str = ""
    """postgresql://user@host/database?sslmode=verify-full where actors run on other machines; empty: a SQLite file in
    the run's folder, also written sqlite:///FILE. A password comes from PGPASSFILE or PGPASSWORD, never from here."""
    bucket: str = ""
    """s3://..., gs://... or file://... for groups larger than inline_bytes; empty: they stay in the database."""
    inline_bytes: int = 4 * 2**20
    """Size of a group from which on it goes to the bucket, where there is one."""
    actor_role: str = "sluice_actor"
    """PostgreSQL role that may serve this run: a login of the actors, or a group of such."""
    lead_s: float = 30.0
    """A learner elsewhere may take the run over after this one has been silent for so long."""
    retry_s: float = 600.0
    """How long a store that can't be reached is tried again before a process gives up and ends."""

    def __post_init__(self) -> None:
        positive("store", inline_bytes=self.inline_bytes, lead_s=self.lead_s, retry_s=self.retry_s)
        if secret := secret_in(self.url):
            raise ValueError(
                f"store.url holds a {secret}, and the config is kept in files; use PGPASSFILE or PGPASSWORD"
            )
        shown = self.url.partition("://")[0]  # the rest may hold a secret
        if self.url and not self.url.startswith(("sqlite:///", "postgresql://", "postgres://")):
            raise ValueError(f"store.url must be sqlite:///FILE or postgresql://..., got {shown!r}")
