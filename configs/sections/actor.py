"""Config sections of actors: engine, environments and sampling."""

import collections
import dataclasses

from configs.sections.base import (
    ActorCommand,
    ActorPath,
    CheckedSection,
    Count,
    CountOrZero,
    Finite,
    Fraction,
    Positive,
    Reward,
    Seconds,
    SecondsOrZero,
    is_core_list,
    temperature,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig(CheckedSection):
    """Engines, verifier processes and ticket leases of actors."""

    max_num_seqs: Count = 64
    """Sequences that one engine runs concurrently."""
    num_engines: Count = 1
    """Engines that launch.local starts on its machine, one actor process per engine. More actors can join from any
    machine."""
    devices: str = ""
    """GPU indices per engine in CUDA_VISIBLE_DEVICES syntax, with ";" between engines ("2;3;4,5"). Empty: the engines
    share the devices that mesh.devices does not use (`launch/supervision/placement.py`)."""
    colocated: bool = False
    """True if engines and learner share devices in turns (the colocated systems of RollPacker section 2.1). Engines
    sleep while the learner trains, and its state is in host memory while they sample. Requires one learner process,
    actors of launch.local, and rounds that train when they are complete (or helpers.num_engines)."""
    tensor_parallel_size: Count = 1
    """Tensor-parallel size of one engine, in devices (in processes on a CPU)."""
    elastic: bool = False
    """True if an actor adapts its tensor-parallel size to the KV cache load. A full KV cache doubles the size; four
    steps that a smaller cache would hold halve it. Each change restarts the engine (RollPacker section 4.2,
    `actor/elastic.py`)."""
    max_tensor_parallel_size: CountOrZero = 0
    """Largest tensor-parallel size of an elastic engine, in devices. All of them stay reserved for the engine. 0:
    tensor_parallel_size. Read only with elastic=true."""
    gpu_memory_utilization: Fraction = 0.9
    """Fraction of each GPU's memory that one engine reserves. No effect on a CPU."""
    kv_cache_gib: Count = 1
    """KV cache per engine on a CPU, in GiB. No effect on a GPU."""
    enforce_eager: bool = False
    """True if the engine runs in eager mode, without CUDA graphs or compilation."""
    prefix_caching: bool = False
    """True if the engine reuses the keys and values of whole prompt blocks for requests with an equal prefix and equal
    weights. A block has 16 tokens on a GPU and 128 on a CPU. Requests of one group and later turns of an episode
    benefit. False: each turn computes its history again."""
    base_path: ActorPath = ""
    """Folder on the actor's machine with the base weights, for publish.lora=adapter. The weights must equal the
    learner's. Empty: model.path."""
    cpu_cores: str = ""
    """CPU cores per engine ("0" or "0-3"), on a CPU. Separate engines with ";" and tensor-parallel processes of one
    engine with "|" ("0|1;2|3"). Empty: several engines split all cores evenly; a single engine is not pinned."""
    lease_s: Seconds = 30.0
    """Lease duration of claimed tickets, in seconds. The store offers tickets of an actor again once its leases
    expire."""
    verifier_timeout_s: Seconds = 10.0
    """Timeout for scoring one response, in seconds."""
    verifier_workers: Count = 1
    """Verifier processes per actor. They run outside the event loop."""
    max_restarts: CountOrZero = 5
    """Consecutive restarts of a dead or hung process before the supervisor gives up. Every new training step resets the
    count. 0: no restarts."""
    shutdown_grace_s: SecondsOrZero = 20.0
    """Time after SIGTERM for an actor to hand over training tickets with their tokens, to score and store sampled
    groups, and to finish episodes and evaluations, in seconds. It then releases the remaining tickets. No effect on
    actors of launch.local, which exit at the end of the run. 0: release all tickets immediately, without tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_tensor_parallel_size < self.tensor_parallel_size:
            raise ValueError(
                f"actor.max_tensor_parallel_size: expected 0 or >= actor.tensor_parallel_size "
                f"({self.tensor_parallel_size}), got {self.max_tensor_parallel_size}"
            )
        self._check_devices()
        self._check_cores()

    @property
    def device_groups(self) -> tuple[tuple[str, ...], ...]:
        """Device names per engine. Empty if `devices` is empty."""
        if not self.devices:
            return ()
        return tuple(tuple(d.strip() for d in group.split(",")) for group in self.devices.split(";"))

    @property
    def core_groups(self) -> tuple[str, ...]:
        """Core lists per engine. Empty if `cpu_cores` is empty."""
        return tuple(group.strip() for group in self.cpu_cores.split(";")) if self.cpu_cores else ()

    @property
    def max_devices_per_engine(self) -> int:
        """Largest number of devices that one engine may use."""
        return max(self.tensor_parallel_size, self.max_tensor_parallel_size if self.elastic else 0)

    def _check_devices(self) -> None:
        groups, least, most = self.device_groups, self.tensor_parallel_size, self.max_devices_per_engine
        if groups and len(groups) != self.num_engines:
            raise ValueError(
                f"actor.devices={self.devices!r}: expected {self.num_engines} groups (actor.num_engines), got "
                f'{len(groups)}. Separate engines with ";" and devices of an engine with ","'
            )
        for group in groups:
            if not all(group) or len(set(group)) != len(group):
                raise ValueError(f"actor.devices={self.devices!r}: expected distinct devices, got {','.join(group)!r}")
            if not least <= len(group) <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                raise ValueError(
                    f"actor.devices={self.devices!r}: expected {wanted} devices per engine "
                    "(actor.tensor_parallel_size; elastic: up to actor.max_tensor_parallel_size), got "
                    f"{','.join(group)!r}"
                )
        shares = collections.Counter(device for group in groups for device in group)
        for device, count in shares.items():
            if count > 1 and count * self.gpu_memory_utilization > 1:
                raise ValueError(
                    f"actor.devices={self.devices!r}: {count} engines use device {device}, each with "
                    f"{self.gpu_memory_utilization:g} of its memory. Lower actor.gpu_memory_utilization"
                )

    def _check_cores(self) -> None:
        groups, size = self.core_groups, self.tensor_parallel_size
        if groups and len(groups) != self.num_engines:
            raise ValueError(
                f"actor.cpu_cores={self.cpu_cores!r}: expected {self.num_engines} groups (actor.num_engines), got "
                f'{len(groups)}. Separate engines with ";"'
            )
        for group in groups:
            parts = group.split("|")
            if not all(map(is_core_list, parts)) or len(parts) != size:
                raise ValueError(
                    f'actor.cpu_cores={self.cpu_cores!r}: expected {size} core lists ("0", "0-3" or "0,2") separated '
                    f'by "|" (actor.tensor_parallel_size), got {group!r}'
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentsConfig(CheckedSection):
    """Limits of episodes, read only by environments (`prompts.environment`)."""

    max_turns: Count = 8
    """Largest number of policy turns per episode. An episode that is not done by its last turn is truncated."""
    max_turn_tokens: CountOrZero = 0
    """Largest number of tokens per turn. A truncated turn is not an action and ends the episode. 0: the remaining
    tokens of the episode, which is limited by sampling.max_response_tokens (sampled and observed tokens) and the
    model's context."""
    truncated_reward: Reward = 0.0
    """Reward added to the last turn of an episode that reached its turn or token limit. Set it below the reward for
    losing, so that stalling does not pay. prompts.truncated_responses applies to verifiers only. 0: no penalty."""
    call_timeout_s: Seconds = 60.0
    """Timeout for the first observation of an episode and for each step, in seconds. On expiry the process is killed
    and the episode is retried without a reward or penalty. Import time of the environment's library is excluded."""
    episode_timeout_s: Seconds = 3600.0
    """Timeout for one episode of an environment that plays by itself, in seconds. Includes the engine's time."""
    max_processes: Count = 256
    """Concurrent environment processes per actor, one per episode; further episodes wait. In a mixture each environment
    has a guaranteed share, so that a hung environment cannot block others
    (`actor/environments/environment_pool.py`)."""
    max_in_flight: CountOrZero = 0
    """Concurrent episodes per actor, including those that wait for their environment and use no engine capacity. A good
    value is max_num_seqs * (1 + environment time / engine time), with both times per turn. Set max_processes at least
    as high. Episodes above the engine's capacity wait in the engine. admission.sequences still limits a window. 0:
    actor.max_num_seqs."""
    max_memory_gib: Positive = 4.0
    """Address space limit of one episode's process, in GiB."""
    python: ActorCommand = ""
    """Python interpreter for `verifiers` environments and custom environments whose libraries conflict with the
    engine's. Its virtual environment needs those libraries, msgspec and jinja2. Empty: the actor's interpreter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(CheckedSection):
    """Sampling parameters of training requests."""

    max_response_tokens: Count = 16
    """Largest number of tokens per response, or per episode of an environment."""
    temperature: Finite = 1.0
    """Sampling temperature. 0 (greedy) is not allowed, because a greedy choice has no importance ratio."""
    top_p: Fraction = 1.0
    """Nucleus sampling mass. Must stay 1.0, because the learner's distribution is not truncated."""
    top_k: CountOrZero = 0
    """Number of candidate tokens. Must stay 0 (all tokens), because the learner's distribution is not truncated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        temperature("sampling", self.temperature)  # rejects 0 too: greedy sampling has no importance ratio
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                "sampling.top_p and sampling.top_k must be 1.0 and 0, because the learner does not truncate its "
                f"distribution, got top_p={self.top_p} top_k={self.top_k}"
            )
