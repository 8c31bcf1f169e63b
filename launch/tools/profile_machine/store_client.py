"""Store client of `launch.tools.profile_machine`, in a separate process."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.heartbeat_types import ActorReport, Heartbeat
from bridge.rollout_types import Group, Rollout, Ticket, Version
from bridge.store.open import SqlStore, open_store
from bridge.store.postgres.connections import Connection, Connections
from bridge.store.postgres.postgres_database import channel_of
from launch.supervision import process_tree
from launch.tools.profile_machine.profile_worker import RpcServer

_LEASE_S = 600.0
_CLAIM_AT_ONCE = 16
"""Tickets per claim, many because claims are measured separately."""
_RETRY_S = 30.0


class Client:
    """Requests that the client handles, by method name."""

    def __init__(self, url: str, run: str, name: str) -> None:
        self._url, self._run, self._name = url, run, name
        self._store: SqlStore = open_store(url, run=run, retry_s=_RETRY_S)
        self._listening: list[Connection] = []
        self._connections: Connections | None = None

    def serve(self, num_tokens: int) -> dict[str, Any]:
        """Submits groups until it gets a ticket for itself alone, which marks the end."""
        num = 0
        while True:
            mark = self._store.mark()
            tickets = self._store.claim(self._name, limit=_CLAIM_AT_ONCE, lease_s=_LEASE_S)
            for ticket in tickets:
                if ticket.kind != "train":
                    return {"num": num}
                self._store.put_group(make_group(ticket, self._name, num_tokens))
            num += len(tickets)
            if not tickets:
                self._store.wait(mark, ("tickets",), timeout_s=1.0)

    def calls(self, what: str, seconds: float) -> dict[str, Any]:
        """Measures one kind of call; claims find no open ticket."""
        calls: dict[str, Callable[[], object]] = {
            "claim": lambda: self._store.claim(self._name, limit=4, lease_s=_LEASE_S),
            "heartbeat": lambda: self._store.heartbeat(make_heartbeat(self._name)),
            "leased": lambda: self._store.leased(self._name),
            "heartbeats": self._store.heartbeats,
        }
        call = calls[what]
        call()
        num, start = 0, time.perf_counter()
        while (spent_s := time.perf_counter() - start) < seconds:
            call()
            num += 1
        return {"num": num, "seconds": spent_s}

    def beat_for(self, num: int) -> dict[str, Any]:
        """Sends one heartbeat for each of `num` other names."""
        for i in range(num):
            self._store.heartbeat(make_heartbeat(f"{self._name}-{i}"))
        return {"num": num}

    def listen(self, num: int) -> dict[str, Any]:
        """Opens `num` more connections that listen to changes and ignore them."""
        self._connections = self._connections or Connections(self._url)
        for _ in range(num):
            connection = self._connections.connect()
            self._listening.append(connection)
            connection.execute(f'LISTEN "{channel_of(self._run)}"'.encode())
        return {"num": len(self._listening)}

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._listening:
            connection.close()
        self._store.close()


def make_group(ticket: Ticket, actor: str, num_tokens: int) -> Group:
    """Returns a group for a ticket, with `num_tokens` tokens per response."""
    rollout = Rollout(
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, np.bool_),
        behavior_logprobs=np.linspace(-1, 0, num_tokens, dtype=np.float32),
        token_versions=np.zeros(num_tokens, np.int32),
        finish="length",
        reward=0.0,
    )
    return Group(
        ticket_id=ticket.id,
        kind=ticket.kind,
        round=ticket.round,
        order=ticket.order,
        prompt_tokens=ticket.prompt_tokens,
        rollouts=(rollout,) * ticket.num_samples,
        incarnation=0,
        actor=actor,
        started_s=0.0,
        finished_s=0.0,
    )


def make_heartbeat(name: str) -> Heartbeat:
    """Returns a heartbeat of the size of a serving actor's."""
    report = ActorReport(
        prefetch_s=1.5,
        verify_s=0.25,
        pause_s=0.125,
        load_s=0.0625,
        num_refused_snapshots=0,
        num_in_service=16,
        num_waiting=16,
        is_shutting_down=False,
        num_groups=1000,
        num_dropped_groups=0,
        num_verifier_failures=0,
        num_judge_retries=0,
        num_judge_failures=0,
        num_episode_failures=0,
        num_sampled_tokens=10**7,
        num_submitted_tokens=10**7,
        max_sequences=256,
        num_running=256,
        num_engine_waiting=0,
        kv_usage=0.5,
        kv_usage_peak=0.9,
        num_preempted=0,
    )
    version = Version(incarnation=0, step=100)
    return Heartbeat(process=name, role="actor", pid=os.getpid(), time_s=time.time(), version=version, report=report)


def main() -> None:
    """Answers requests until there are no more."""
    given = process_tree.arguments(sys.argv, "URL RUN NAME", command="launch.tools.profile_machine")
    parent = RpcServer()
    with contextlib.ExitStack() as stack:
        try:
            client = Client(*given)
            stack.callback(client.close)
            parent.answer({"ready": True})
            while (request := parent.receive()) is not None:
                parent.answer(getattr(client, request.pop("do"))(**request))
        except Exception as e:
            parent.fail(e)
            raise


if __name__ == "__main__":
    main()
