"""What a run has done so far, as its event log and the database say: how a campaign knows that a fault was survived."""

import asyncio
import json
import pathlib
import time

import psycopg

from tests.integration.faults.store_process import StoreProcess

_AGAIN_S = 0.3


class Progress:
    """Reads the learner's event log as it grows."""

    def __init__(self, events: pathlib.Path, store: StoreProcess) -> None:
        """Nothing was read yet; `events` is the run's folder of them."""
        self._file, self._store = events / "learner.jsonl", store
        self._place = 0
        self.num_lives = 0
        """Learners that got as far as to restore."""
        self.step = 0
        """The last optimizer step."""
        self._trained: dict[str, tuple[int, float]] = {}
        """Ticket -> the last life that trained a group of it in an update, and when that was read (Unix seconds)."""
        self._filling: list[str] = []

    def look(self) -> None:
        """Reads on."""
        if not self._file.exists():
            return
        with open(self._file, "rb") as file:
            file.seek(self._place)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._place += end
        for line in text[:end].splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # a killed learner's last line
                continue
            self._take(event)

    def _take(self, event: dict) -> None:
        if event["ph"] == "M":
            self.num_lives += 1
            self._filling = []
        elif event["name"] == "train":
            self._filling += [t for t in event["args"]["groups"].split(",") if t]
        elif event["name"] == "apply":
            self.step = event["args"]["step"]
            self._trained |= dict.fromkeys(self._filling, (self.num_lives, time.time()))
            self._filling = []

    async def announced_after(self, time_s: float) -> float:
        """When the first version was announced after a moment (Unix seconds); waits for it."""
        question = "SELECT min(time_s) FROM recorder.announcements WHERE time_s > %s"
        while (found := (await self.ask(question, time_s))[0][0]) is None:
            await asyncio.sleep(_AGAIN_S)
        return found

    async def has_trained(self, *, made_after_s: float, by: str | None, after_life: int) -> bool:
        """Whether a group was trained that the store was given after `made_after_s`, in a later life than `after_life`.

        The same ticket's group may have been trained before, by a learner whose updates were thrown away since: that
        one was not it.
        """
        question = (
            "SELECT ticket_id, time_s FROM recorder.groups WHERE time_s > %s AND op = 'INSERT' AND kind = 'train'"
        )
        if by is None:
            given = await self.ask(question, made_after_s)
        else:
            given = await self.ask(f"{question} AND %s = ANY (string_to_array(actor, '&'))", made_after_s, by)
        for ticket_id, put_s in given:
            life, trained_s = self._trained.get(ticket_id, (0, 0.0))
            if life > after_life and trained_s >= put_s:
                return True
        return False

    async def ask(self, question: str, *values: object) -> list[tuple]:
        """What the database answers, as soon as it does."""
        while True:
            try:
                return await asyncio.to_thread(self._store.ask, question, *values)
            except (psycopg.OperationalError, OSError, IndexError):
                await asyncio.sleep(_AGAIN_S)
