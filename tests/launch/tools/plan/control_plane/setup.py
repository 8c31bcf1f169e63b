"""Stores, networks and clusters whose loads can be worked out by hand."""

import dataclasses
from typing import Any

from configs.schema import Config
from launch.tools.plan.control_plane.capacity import ClusterModel
from launch.tools.plan.control_plane.loads import Resource
from launch.tools.plan.profile import NetworkProfile, StoreProfile
from tests.launch.tools.plan.setup import by_window, profile_of


def store(**fields) -> StoreProfile:
    """A group takes 0.1 s, nothing else takes anything."""
    return StoreProfile(**(dict[str, Any](group_s=0.1) | fields))


def network(**fields) -> NetworkProfile:
    """1,000 bytes of weights; nothing has a bound."""
    return NetworkProfile(**(dict[str, Any](weights_bytes=1000) | fields))


def served(config: Config | None = None, **publish) -> Config:
    """A window whose weights leave the machine."""
    config = config or by_window(U=2, K=2, admission=dict(sequences=128))
    fields: dict[str, Any] = dict(serve="https", full_every=1) | publish
    return dataclasses.replace(config, publish=dataclasses.replace(config.publish, **fields))


def cluster_of(config: Config | None = None, **fields) -> ClusterModel:
    return ClusterModel.of(config or served(), profile_of(**fields))


def part_of(cluster: ClusterModel, name: str, *, groups_per_s: float) -> Resource:
    (part,) = [p for p in cluster.parts(groups_per_s) if p.name == name]
    return part
