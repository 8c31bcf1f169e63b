"""A store of two runs, and roles that attack it."""

import dataclasses
import hashlib

import blake3
import psycopg

from bridge.store.open import PostgresStore
from bridge.weight_types import CardFile, RunCard
from tests.postgres import Server

LEARNER, ACTOR, STRANGER = "security_learner", "security_actor", "security_stranger"
RUN, OTHER = "run-of-ours", "run-of-others"
TABLES = (
    "runs",
    "restores",
    "tickets",
    "groups",
    "payloads",
    "heartbeats",
    "serving",
    "fences",
    "announcements",
    "cards",
    "blobs",
    "anchors",
    "format",
)

CARD = RunCard(
    run=RUN,
    name="n",
    config="{}",
    files=(CardFile(name="config.json", num_bytes=2, blake3=blake3.blake3(b"{}").hexdigest()),),
    tensors=(),
    sluice="1",
    vllm="",
)


@dataclasses.dataclass
class Site:
    """A store of two runs; the actor's role serves one of them."""

    server: Server
    database: str
    learner: PostgresStore
    actor: PostgresStore

    def connect(self, role: str, *, autocommit: bool = True) -> psycopg.Connection:
        """Any SQL in a role."""
        url = self.server.url(role, self.database)
        return psycopg.connect(url, autocommit=autocommit, options="-c search_path=sluice,pg_temp")

    def digest(self) -> str:
        """Of all that is stored, and of the rules it is under, as the superuser sees them."""
        with self.connect("postgres") as db:
            rows = [db.execute(f"SELECT * FROM sluice.{table} t ORDER BY t::text").fetchall() for table in TABLES]
            rules = """SELECT oid::regproc::text || prosrc || proowner || prosecdef FROM pg_proc
                WHERE pronamespace = 'sluice'::regnamespace UNION ALL
                SELECT relname || relrowsecurity || relforcerowsecurity || coalesce(relacl::text, '') || relowner
                FROM pg_class WHERE relnamespace = 'sluice'::regnamespace UNION ALL
                SELECT polname || coalesce(polqual::text, '') FROM pg_policy UNION ALL
                SELECT tgname || tgenabled::text FROM pg_trigger WHERE NOT tgisinternal UNION ALL
                SELECT roleid || ' ' || member FROM pg_auth_members ORDER BY 1"""
            return hashlib.sha256(repr([rows, db.execute(rules).fetchall()]).encode()).hexdigest()
