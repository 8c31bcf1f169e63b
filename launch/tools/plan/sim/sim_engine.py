"""A generation engine in virtual time: vLLM with known response lengths. Pure.

All running sequences advance at the same rate, total(h) / h tokens/s for h sequences. So the engine keeps a single
counter of tokens per sequence. A request that starts at counter s with n tokens to go finishes at mark s + n, and the
lowest mark is the next event. Each event costs O(log n), for any number of sequences.

Requests wait by priority (lowest value first) for one of `max_num_seqs` slots and for free KV cache. Accepting a
request and computing its prompt block all others. When the cache is full, the running request with the highest priority
value is preempted. Its cache is dropped, and its prompt and tokens are recomputed later.

While draining, the engine serves all its requests, including waiting ones, before it loads the new weights. As with
vLLM, the caller must add no requests meanwhile.
"""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Literal

from launch.tools.plan.profile import EngineProfile

AtPublish = Literal["keep", "abort_and_resume", "drain"]
NEVER = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished response."""

    id: str
    time_s: float
    spans: list[tuple[int, float]]
    """Pairs (step of the weights, tokens generated) in order; the tokens sum to the response's length."""


@dataclasses.dataclass(slots=True, eq=False)
class _SimRequest:
    id: str
    priority: int
    prompt_tokens: int
    response_tokens: int
    to_prefill: float
    """Tokens to compute at its start."""
    is_taken_in: bool = False
    """True once `EngineProfile.request_s` is charged."""
    made: float = 0.0
    """Tokens generated before its last start."""
    began: float | None = None
    """Counter at its last start; None unless running."""
    place: Literal["waiting", "starting", "running", "gone"] = "waiting"
    entry: int = 0
    """Number of its heap entry; other entries are void."""
    spans: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class SimEngine:
    """Simulated engine. The caller advances it by events: `advance(next_event_s())`."""

    def __init__(self, profile: EngineProfile, *, step: int = 0) -> None:
        """Starts empty at time 0, with weights of `step`."""
        self.profile = profile
        self.now_s = 0.0
        self.num_preemptions = 0
        self.recomputed_tokens = 0.0
        """Tokens recomputed after a preemption or an update."""
        self.busy_s = 0.0
        """Seconds with at least one request in a slot."""
        self.sequence_s = 0.0
        """Integral of occupied slots over time."""
        self._speeds = profile.speeds()
        self._is_bounded = profile.kv_capacity_tokens > 0
        self._kept_free = profile.kv_watermark * profile.kv_capacity_tokens
        self._requests: dict[str, _SimRequest] = {}
        self._num_entries = 0
        self._counter = 0.0
        self._stalled_until = 0.0
        self._num_running = 0
        self._num_starting = 0
        self._kv_offset = 0.0  # tokens in the cache are this plus counter x running
        # Heaps of (rank, entry, request).
        self._waiting: list[tuple[int, int, _SimRequest]] = []
        self._starting: list[tuple[float, int, _SimRequest]] = []
        self._marks: list[tuple[float, int, _SimRequest]] = []
        self._by_priority: list[tuple[int, int, _SimRequest]] = []
        self._version_counters = [0.0]
        self._version_steps = [step]
        self._draining: tuple[int, float] | None = None

    @property
    def step(self) -> int:
        """Step of the served weights."""
        return self._version_steps[-1]

    @property
    def is_draining(self) -> bool:
        """True if new weights wait for the last request; no requests should be added meanwhile."""
        return self._draining is not None

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def num_in_place(self) -> int:
        """Number of occupied slots, at most `max_num_seqs`."""
        return self._num_running + self._num_starting

    @property
    def kv_tokens(self) -> float:
        """Tokens in the KV cache."""
        return self._kv_offset + self._counter * self._num_running

    def add(
        self, now_s: float, id: str, *, priority: int, prompt_tokens: int, response_tokens: int, cached_tokens: int = 0
    ) -> None:
        """Adds a request; `cached_tokens` of its prompt need no computation.

        Raises ValueError if the request can never fit the KV cache, has no response token, or its id exists.
        """
        if id in self._requests:
            raise ValueError(f"request {id} is in the engine already")
        if response_tokens < 1 or prompt_tokens < 0:
            raise ValueError(f"request {id} requires at least 1 response token, got {response_tokens}")
        capacity = self.profile.kv_capacity_tokens
        if capacity and prompt_tokens + response_tokens > capacity:
            raise ValueError(
                f"request {id} of {prompt_tokens} + {response_tokens} tokens can never fit "
                f"engine.kv_capacity_tokens={capacity}; raise it or shorten the responses"
            )
        self._move(now_s)
        request = _SimRequest(id, priority, prompt_tokens, response_tokens, float(prompt_tokens - cached_tokens))
        self._requests[id] = request
        self._wait(request)
        self._fill()

    def abort(self, now_s: float, id: str) -> float:
        """Aborts a request; returns its generated tokens, 0 for an unknown id."""
        self._move(now_s)
        request = self._requests.pop(id, None)
        if request is None:
            return 0.0
        made = self._leave(request)
        request.place = "gone"
        self._settle()
        return made

    def update(
        self, now_s: float, *, step: int, pause_s: float, at_publish: AtPublish, recompute: bool = False
    ) -> None:
        """Loads new weights: pauses for `pause_s` without generation, then continues with them.

        With drain it first serves all its requests. Later updates replace a pending one. With keep, `recompute` lets
        running requests recompute their keys and values.
        """
        self._move(now_s)
        if at_publish == "drain":
            self._draining = (step, pause_s)
            self._settle()
            return
        if at_publish == "abort_and_resume":
            for request in [r for r in self._requests.values() if r.place in ("running", "starting")]:
                self._put_back(request)
        self._swap(step, pause_s)
        if recompute and at_publish == "keep":
            self.recomputed_tokens += self.kv_tokens
            self._stalled_until += self.kv_tokens * self.profile.prefill_s_per_token
            self._stalled_until += self.num_in_place * self.profile.restart_s
        self._fill()

    def hand_over(self, now_s: float, others: Sequence["SimEngine"]) -> dict[str, int]:
        """Moves each request to the other engine with the fewest requests; returns the index per request id.

        Requests keep their tokens and recompute keys and values (RollPacker section 4.4).
        """
        for engine in (self, *others):
            engine._move(now_s)
        hosts: dict[str, int] = {}
        for request in list(self._requests.values()):
            index = min(range(len(others)), key=lambda i: others[i].num_requests)
            others[index]._requests[request.id] = moved = self._taken_out(request)
            others[index]._wait(moved)
            hosts[request.id] = index
        self._requests.clear()
        for engine in others:
            engine._fill()
        return hosts

    def _taken_out(self, request: _SimRequest) -> _SimRequest:
        """Removes the request and returns a copy for another engine. Later heap entries of the original are ignored."""
        if request.place in ("running", "starting"):
            request.to_prefill = request.prompt_tokens + self._leave(request)
            self.recomputed_tokens += request.to_prefill
        copy = dataclasses.replace(request, place="waiting")
        request.place, request.entry = "gone", 0
        return copy

    def next_event_s(self) -> float:
        """Returns the time of the next event; infinity if there is none."""
        return self._next()[0]

    def advance(self, now_s: float) -> list[FinishedRequest]:
        """Advances to `now_s`; returns the responses finished on the way, in order."""
        finished: list[FinishedRequest] = []
        while (event := self._next())[0] <= now_s:
            at_s, what, counter = event
            self._move_to(at_s)
            if what == "start":
                self._run(heapq.heappop(self._starting)[2])
                continue
            self._counter = counter  # exact, so that token counts stay whole
            if what == "full":
                self._preempt()
                continue
            self._end_marked(at_s, finished)
            self._settle()
        self._move_to(now_s)
        return finished

    def _end_marked(self, at_s: float, finished: list[FinishedRequest]) -> None:
        """Finishes all requests whose mark is reached, before others start."""
        while self._marks and self._marks[0][0] <= self._counter:
            _, entry, request = heapq.heappop(self._marks)
            if entry == request.entry:
                self._leave(request)
                request.place = "gone"
                del self._requests[request.id]
                finished.append(FinishedRequest(request.id, at_s, request.spans))

    def _next(self) -> tuple[float, str, float]:
        """Returns (time, kind, counter) of the next event."""
        while self._starting and self._starting[0][1] != self._starting[0][2].entry:
            heapq.heappop(self._starting)
        start_s = self._starting[0][0] if self._starting else NEVER
        if not self._num_running:
            return start_s, "start", self._counter
        while (top := self._marks[0])[1] != top[2].entry:
            heapq.heappop(self._marks)
        what, counter = "end", top[0]
        if self._is_bounded and self.num_in_place > 1:
            full = math.floor((self.profile.kv_capacity_tokens - self._kv_offset) / self._num_running + 1e-6)
            if full < counter:
                what, counter = "full", float(full)
        counter = max(counter, self._counter)
        at_s = max(self.now_s, self._stalled_until)
        at_s += (counter - self._counter) / self._speeds[self._num_running]
        return (at_s, what, counter) if at_s <= start_s else (start_s, "start", self._counter)

    def _move(self, now_s: float) -> None:
        if now_s < self.now_s:
            raise ValueError(f"time must not decrease: {now_s} is before {self.now_s}")
        self._move_to(now_s)

    def _move_to(self, now_s: float) -> None:
        took = now_s - self.now_s
        if took <= 0:
            return
        if self._num_running:
            active = now_s - max(self.now_s, self._stalled_until)
            if active > 0:
                self._counter += active * self._speeds[self._num_running]
        if places := self.num_in_place:
            self.busy_s += took
            self.sequence_s += took * places
        self.now_s = now_s

    def _wait(self, request: _SimRequest) -> None:
        request.place = "waiting"
        heapq.heappush(self._waiting, (request.priority, self._enter(request), request))

    def _enter(self, request: _SimRequest) -> int:
        self._num_entries += 1
        request.entry = self._num_entries
        return request.entry

    def _settle(self) -> None:
        """Completes a drain if possible, and fills free slots."""
        if self._draining and not self._requests:
            step, pause_s = self._draining
            self._draining = None
            self._swap(step, pause_s)
        self._fill()

    def _swap(self, step: int, pause_s: float) -> None:
        self._stalled_until = max(self.now_s, self._stalled_until) + pause_s
        self._version_counters.append(self._counter)
        self._version_steps.append(step)

    def _fill(self) -> None:
        while self._waiting and self.num_in_place < self.profile.max_num_seqs:
            _, entry, request = self._waiting[0]
            if entry != request.entry:
                heapq.heappop(self._waiting)
                continue
            size = request.prompt_tokens + request.made
            if self._is_bounded and self.num_in_place:
                room = self.profile.kv_capacity_tokens - self.kv_tokens - size
                # Reserve one token per sequence, or one would be preempted immediately.
                if room < max(self._kept_free, self.num_in_place + 1):
                    return
            heapq.heappop(self._waiting)
            self._start(request, size)

    def _start(self, request: _SimRequest, size: float) -> None:
        took = request.to_prefill * self.profile.prefill_s_per_token
        if not request.is_taken_in:
            request.is_taken_in = True
            took += self.profile.request_s
        else:
            took += self.profile.restart_s
        if took:
            self._stalled_until = max(self.now_s, self._stalled_until) + took
        request.place = "starting"
        entry = self._enter(request)
        self._kv_offset += size
        if self._is_bounded:
            heapq.heappush(self._by_priority, (-request.priority, -entry, request))
        self._num_starting += 1
        if self.profile.start_latency_s:
            heapq.heappush(self._starting, (self.now_s + self.profile.start_latency_s, entry, request))
        else:
            self._run(request)

    def _run(self, request: _SimRequest) -> None:
        self._num_starting -= 1
        self._num_running += 1
        request.place = "running"
        request.began = self._counter
        mark = self._counter + request.response_tokens - request.made
        self._kv_offset -= self._counter
        heapq.heappush(self._marks, (mark, self._enter(request), request))

    def _leave(self, request: _SimRequest) -> float:
        if request.place == "running":
            assert request.began is not None
            self._note_spans(request)
            request.made += self._counter - request.began
            self._num_running -= 1
            self._kv_offset -= request.prompt_tokens + request.made - self._counter
            request.began = None
        elif request.place == "starting":
            self._num_starting -= 1
            self._kv_offset -= request.prompt_tokens + request.made
        request.entry = 0
        if not self.num_in_place:
            self._kv_offset = 0.0  # prevents accumulated rounding errors
        return request.made

    def _put_back(self, request: _SimRequest) -> None:
        """Drops a request's cache and requeues it for recomputation."""
        made = self._leave(request)
        request.to_prefill = request.prompt_tokens + made
        self.recomputed_tokens += request.to_prefill
        self._wait(request)

    def _preempt(self) -> None:
        capacity = self.profile.kv_capacity_tokens
        while self.num_in_place > 1 and self.kv_tokens + self._num_running > capacity + 1e-7:
            request = heapq.heappop(self._by_priority)[2]
            if request.place in ("running", "starting"):
                self._put_back(request)
                self.num_preemptions += 1

    def _note_spans(self, request: _SimRequest) -> None:
        """Adds the tokens since the last start to the spans, by weights."""
        at = request.began
        assert at is not None
        first = bisect.bisect_right(self._version_counters, at) - 1
        for index in range(first, len(self._version_counters)):
            last = index + 1 == len(self._version_counters)
            until = self._counter if last else self._version_counters[index + 1]
            if until > at:
                step, tokens = self._version_steps[index], until - at
                if request.spans and request.spans[-1][0] == step:  # it was preempted in between
                    tokens += request.spans.pop()[1]
                request.spans.append((step, tokens))
                at = until
