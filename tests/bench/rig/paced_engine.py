"""An engine of any speed, in real time: the simulated engine of `launch.tools.plan`, moved by the clock.

Actor, store, bridge and learner are the real ones; only the tokens come from nowhere, when the simulated engine says
that they are there. So a question about schedules can be asked of an engine that this machine does not have.
"""

import asyncio
import pathlib
import re
import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import EngineSize, EngineStats, PartialSample, Sample, SwapTimings
from bridge.heartbeat_types import DecodeSpeed
from bridge.rollout_types import Sampling, Version
from bridge.weight_types import WeightManifest
from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.sim.sim_engine import NEVER, FinishedRequest, SimEngine
from learner.schedule.frontier_width import MIN_STEPS

LOGPROB = -3.0
"""Of every token, in nats: near that of a model that knows a few dozen tokens. Nothing is learned from them."""


class PacedEngine:
    """An `actor.engine_protocol.Engine` that makes tokens as fast as a profile says, out of the prompt's own."""

    def __init__(
        self,
        profile: EngineProfile,
        *,
        pause_s: float = 0.0,
        version: Version | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Empty; an update stops it for `pause_s`. One that is to sample without an update is given a `version`."""
        self._sim = SimEngine(profile)
        self._pause_s, self._clock = pause_s, clock
        self._start_s = clock()
        self._version = version
        self._versions: dict[int, Version] = {} if version is None else {0: version}
        self._ends: dict[str, asyncio.Future[FinishedRequest]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._num_tokens = 0
        self._num_finished = 0
        running = [1 << i for i in range(profile.max_num_seqs.bit_length())]
        self._decode_speeds = tuple(
            DecodeSpeed(num_steps=MIN_STEPS, num_tokens=MIN_STEPS * h, seconds=MIN_STEPS * h / profile.throughput(h))
            for h in running
        )

    @property
    def version(self) -> Version | None:
        """The weights now served."""
        return self._version

    @property
    def is_dead(self) -> bool:
        """It has no process."""
        return False

    @property
    def num_requests(self) -> int:
        """Those that have not ended."""
        return len(self._ends)

    @property
    def num_sampled_tokens(self) -> int:
        """Of the responses that ended."""
        return self._num_tokens

    @property
    def stats(self) -> EngineStats:
        """The load now."""
        running = self._sim.num_in_place
        return EngineStats(
            num_running=running,
            num_waiting=self._sim.num_requests - running,
            kv_usage=0.0,
            kv_usage_peak=0.0,
            num_preempted=self._sim.num_preemptions,
            num_finished=self._num_finished,
            num_sampled_tokens=self._num_tokens,
            decode_speeds=self._decode_speeds,
        )

    @property
    def size(self) -> EngineSize:
        """The profile's."""
        profile = self._sim.profile
        return EngineSize(
            max_num_seqs=profile.max_num_seqs,
            tensor_parallel_size=1,
            kv_tokens=profile.kv_capacity_tokens,
            weights_kv_tokens=0,
        )

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        """A response of `sampling.max_tokens` tokens, when the simulated engine has made them."""
        assert begun is None  # the actors of a bench hand nothing over
        now_s = self._advance()
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        self._sim.add(
            now_s,
            request_id,
            priority=priority,
            prompt_tokens=prompt_tokens.size,
            response_tokens=sampling.max_tokens,
        )
        self._arm()
        try:
            finished = await end
        except asyncio.CancelledError:
            await self.abort(request_id)
            raise
        finally:
            self._ends.pop(request_id, None)
        self._num_tokens += sampling.max_tokens
        self._num_finished += 1
        versions = _token_versions(finished, sampling.max_tokens)
        return Sample(
            tokens=np.resize(np.roll(prompt_tokens, _rank(request_id)), sampling.max_tokens).astype(np.int32),
            logprobs=np.full(sampling.max_tokens, LOGPROB, np.float32),
            token_versions=tuple(self._versions[step] for step in versions),
            finish="length",
        )

    async def abort(self, request_id: str) -> None:
        """Ends a request early."""
        self._sim.abort(self._advance(), request_id)
        self._arm()

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Takes the version's name and stands still for the pause; the weights themselves do nothing here."""
        del path
        step = len(self._versions)
        self._versions[step] = self._version = manifest.version
        self._sim.update(self._advance(), step=step, pause_s=self._pause_s, at_publish="keep")
        self._arm()
        await asyncio.sleep(self._pause_s)
        return SwapTimings(check_s=0.0, pause_s=self._pause_s, load_s=0.0)

    async def sleep(self) -> None:
        """It has no memory."""

    async def wake_up(self) -> None:
        """It has no memory."""

    async def close(self) -> None:
        """Nothing is open but the alarm."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _advance(self) -> float:
        """Brings the simulated engine up to now, and answers whom it has finished; returns its time."""
        now_s = max(self._clock() - self._start_s, self._sim.now_s)
        for finished in self._sim.advance(now_s):
            end = self._ends.get(finished.id)
            if end is not None and not end.done():
                end.set_result(finished)
        return now_s

    def _arm(self) -> None:
        """Asks to be called at the next event, which may have become another one."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if (at_s := self._sim.next_event_s()) < NEVER:
            wait_s = max(0.0, self._start_s + at_s - self._clock())
            self._alarm = asyncio.get_running_loop().call_later(wait_s, self._on_alarm)

    def _on_alarm(self) -> None:
        self._advance()
        self._arm()


def _rank(request_id: str) -> int:
    """A request's number among its prompt's, as in "000000003.7"; an attempt's, or a turn's, comes behind it."""
    number = re.match(r"\d+", request_id.split(".")[1])
    assert number is not None, request_id
    return int(number[0])


def _token_versions(finished: FinishedRequest, num_tokens: int) -> list[int]:
    """The step behind each token: spans are fractions of tokens where an update came in the middle of one."""
    steps = np.array([step for step, _ in finished.spans])
    ends = np.cumsum([tokens for _, tokens in finished.spans])
    return steps[np.minimum(np.searchsorted(ends, np.arange(num_tokens) + 0.5), len(steps) - 1)].tolist()
