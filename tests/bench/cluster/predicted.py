"""What the planner says of the same: the pace at which the store is the first part to give out."""

import dataclasses

from configs import schema, sections
from launch.tools.plan.control_plane.capacity import ClusterModel, bottleneck
from launch.tools.plan.control_plane.transfers import Transfers
from launch.tools.plan.profile import EngineProfile, LearnerProfile, NetworkProfile, Profile, StoreProfile
from launch.tools.plan.workload import LengthProfile
from tests.bench.cluster.measured import WINDOW, Case

_FAST = 1e9
"""Tokens a second of engines and learner: nothing but the store bounds these runs."""


def predicted_groups_per_s(store: StoreProfile, case: Case) -> float:
    """Of a case; its tickets are offered by half windows, which is a round here, and its engines are always full."""
    rounds = sections.RoundsConfig(
        groups_per_round=WINDOW // 2, groups_per_update=WINDOW // 2, samples_per_group=case.num_samples
    )
    config = schema.Config(
        preset="bench",
        run=sections.RunConfig(num_updates=1),
        rounds=rounds,
        publish=sections.PublishConfig(when="round_end"),
    )
    profile = _profile(store, case.num_tokens, num_engines=case.num_producers + case.num_lookers)
    # Producers claim as they hand in; who looks has no room. Neither asks because it has nothing to do.
    cluster = dataclasses.replace(ClusterModel.of(config, profile), engines_stay_full=True)
    limit = bottleneck(cluster)
    assert limit.part.name == "store", limit
    return limit.groups_per_s


def predicted_download_s(num_bytes: int, *, link_bytes_per_s: float) -> float:
    """Of one actor host over one learner host's link."""
    config = schema.Config(
        preset="bench",
        run=sections.RunConfig(num_updates=4),
        publish=sections.PublishConfig(serve="https"),
    )
    profile = dataclasses.replace(
        _profile(None, 100, num_engines=1),
        network=NetworkProfile(weights_bytes=num_bytes, learner_bytes_per_s=link_bytes_per_s),
    )
    transfers = Transfers.of(config, profile)
    assert transfers is not None
    return transfers.download_s(num_bytes)


def _profile(store: StoreProfile | None, num_tokens: int, *, num_engines: int) -> Profile:
    return Profile(
        engine=EngineProfile(running=(1.0,), tokens_per_s=(_FAST,), max_num_seqs=1),
        response_tokens=LengthProfile(kind="samples", samples=(num_tokens,)),
        prompt_tokens=LengthProfile(kind="samples", samples=(2,)),
        learner=LearnerProfile(seconds_per_token=1 / _FAST),
        num_engines=num_engines,
        store=store,
    )
