"""The learner's devices."""

import dataclasses
import math

from configs.checks import Count, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The learner's device mesh; the product must be the number of devices."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of a learner that launch.local starts. Empty: the first that actor.devices does not name, as
    many as the mesh has, where this machine has GPUs enough (`launch/placement.py`), else what launch.local sees."""
    data: Count = 1
    """Whole copies of the parameters."""
    fsdp: Count = 1
    """Splits parameters, optimizer state and the rows of a batch."""
    expert: Count = 1
    """The same, and the experts of a MoE model."""
    sequence: Count = 1
    """Splits the tokens of a row (context parallelism)."""
    tensor: Count = 1
    """Splits heads, MLP width and vocabulary."""

    def __post_init__(self) -> None:
        check_ranges("mesh", self)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by the names of `learner.devices.mesh.AXES`."""
        names = ("data", "fsdp", "expert", "sequence", "tensor")
        return {name: getattr(self, name) for name in names}

    @property
    def num_devices(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.axes.values())

    @property
    def batch_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.data * self.fsdp * self.expert
