"""Engine, leases, sampling, environments."""

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
    """The engine and the loop around it."""

    max_num_seqs: Count = 64
    """Sequences the engine runs at once."""
    num_engines: Count = 1
    """Engines that launch.local starts on its machine, each in an actor of its own; others may join from anywhere."""
    devices: str = ""
    """Which devices those engines take, as CUDA_VISIBLE_DEVICES names them: a group for each engine, ";" between groups
    ("2;3;4,5"). Empty: they share out what mesh.devices leaves (`launch/supervision/placement.py` says how)."""
    tensor_parallel_size: Count = 1
    """Devices that one engine is spread over; on a CPU, processes."""
    elastic: bool = False
    """Adapts how many sequences run at once, and restarts an engine at another tensor parallel size when preemptions,
    or responses that nearly fill its KV cache, ask for it (RollPacker section 4.2; `actor/elastic.py`)."""
    max_tensor_parallel_size: CountOrZero = 0
    """With elastic: devices that one engine may take, all reserved for it from its start on, whatever it takes just
    then; 0 means tensor_parallel_size."""
    gpu_memory_utilization: Fraction = 0.9
    """On a GPU."""
    kv_cache_gib: Count = 1
    """On a CPU."""
    enforce_eager: bool = False
    prefix_caching: bool = False
    """Keeps the keys and values of whole blocks of a prompt (16 tokens on a GPU, 128 on a CPU) for the next request
    that begins alike, under the same weights: a group's siblings, and an episode's next turn, whose prompt is all that
    was said. Without it each turn computes its history again."""
    base_path: ActorPath = ""
    """With publish.lora=adapter: the folder with the base's weights on this actor's machine; empty: model.path. They
    must be the learner's own."""
    cpu_cores: str = ""
    """Cores the engine is pinned to on a CPU ("0" or "0-3"): a group for each of several engines, ";" between them, and
    "|" between the processes of a group with tensor_parallel_size ("0|1;2|3"). Empty: several engines share all cores
    out evenly, one is left to itself."""
    lease_s: Seconds = 30.0
    """A dead actor's tickets are offered again after this long."""
    verifier_timeout_s: Seconds = 10.0
    verifier_retries: CountOrZero = 2
    """Of what failed; before each there is a pause of seconds, which grows."""
    verifier_workers: Count = 1
    """Processes that judge responses, off the event loop."""
    max_restarts: CountOrZero = 5
    """How often in a row, without a new step in between, the supervisor starts a process again that died or hung."""
    start_timeout_s: Seconds = 600.0
    """An engine that is not up by then has hung; its actor ends."""
    max_attempts: Count = 3
    """How often a prompt is tried whose responses can't be judged; then another takes its place."""
    shutdown_grace_s: SecondsOrZero = 20.0
    """How long an actor that is told to end (SIGTERM) goes on with the groups it has; the rest it gives back. One that
    launch.local started ends at once, as the run has ended."""
    max_unstored_groups: Count = 64
    """Groups that are sampled and not stored, from which on an actor begins nothing: the store is away, or slow, or its
    verifiers are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_tensor_parallel_size < self.tensor_parallel_size:
            raise ValueError(
                f"actor.max_tensor_parallel_size ({self.max_tensor_parallel_size}) is below "
                f"actor.tensor_parallel_size ({self.tensor_parallel_size})"
            )
        self._check_devices()
        self._check_cores()

    @property
    def device_groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each engine; none where they are not given."""
        if not self.devices:
            return ()
        return tuple(tuple(d.strip() for d in group.split(",")) for group in self.devices.split(";"))

    @property
    def core_groups(self) -> tuple[str, ...]:
        """The cores of each engine; none where they are not given."""
        return tuple(group.strip() for group in self.cpu_cores.split(";")) if self.cpu_cores else ()

    @property
    def max_devices_per_engine(self) -> int:
        """Devices that an engine may come to take."""
        return max(self.tensor_parallel_size, self.max_tensor_parallel_size if self.elastic else 0)

    def _check_devices(self) -> None:
        groups, least, most = self.device_groups, self.tensor_parallel_size, self.max_devices_per_engine
        if groups and len(groups) != self.num_engines:
            raise ValueError(
                f"actor.devices={self.devices!r} is {len(groups)} groups, got actor.num_engines={self.num_engines}; "
                'want a group for each engine, ";" between groups and "," within one'
            )
        for group in groups:
            if not all(group) or len(set(group)) != len(group):
                raise ValueError(f"actor.devices={self.devices!r}: {','.join(group)!r} is no list of different devices")
            if not least <= len(group) <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                raise ValueError(
                    f"actor.devices={self.devices!r}: the group {','.join(group)!r} has {len(group)} devices, an "
                    f"engine takes {wanted} (actor.tensor_parallel_size, and an elastic one up to "
                    "actor.max_tensor_parallel_size)"
                )
        shares = collections.Counter(device for group in groups for device in group)
        for device, count in shares.items():
            if count > 1 and count * self.gpu_memory_utilization > 1:
                raise ValueError(
                    f"actor.devices={self.devices!r} gives device {device} to {count} engines, which take "
                    f"{self.gpu_memory_utilization:g} of its memory each (actor.gpu_memory_utilization)"
                )

    def _check_cores(self) -> None:
        groups, size = self.core_groups, self.tensor_parallel_size
        if groups and len(groups) != self.num_engines:
            raise ValueError(
                f"actor.cpu_cores={self.cpu_cores!r} is {len(groups)} groups, got actor.num_engines="
                f'{self.num_engines}; want a group for each engine, ";" between groups'
            )
        for group in groups:
            parts = group.split("|")
            if not all(map(is_core_list, parts)) or len(parts) != size:
                raise ValueError(
                    f'actor.cpu_cores={self.cpu_cores!r}: {group!r} is no list of cores ("0", "0-3" or "0,2") for each '
                    f'of {size} processes (actor.tensor_parallel_size), "|" between processes'
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentsConfig(CheckedSection):
    """How episodes are played; what is played is said by `prompts`. A single-turn task reads none of it."""

    max_turns: Count = 8
    """Turns of the policy in an episode; one that isn't done by then is truncated."""
    max_turn_tokens: CountOrZero = 0
    """Tokens of one turn; one that this cuts off is no action, and ends the episode. 0: what the episode has left. An
    episode has sampling.max_response_tokens, sampled and observed, and no more than the model's context."""
    truncated_reward: Reward = 0.0
    """Added to what the last turn earned, where a budget of turns or tokens ended the episode: below what losing earns,
    so that stalling is no way out of it. prompts.truncated_responses is about verifiers alone."""
    reset_timeout_s: Seconds = 60.0
    """Seconds until a new episode's first observation; importing the environment's library comes before."""
    step_timeout_s: Seconds = 60.0
    """Seconds an environment may take to answer an action. What takes longer is killed; that earns nothing and costs
    nothing: the episode is tried again."""
    episode_timeout_s: Seconds = 3600.0
    """The same for the one step of an environment that plays itself: a whole episode, the engine's time included."""
    retries: CountOrZero = 2
    """How often an episode whose environment failed is played again, from its start; then its group is dropped."""
    max_processes: Count = 256
    """Episodes of one actor at once, each of them a process; others wait their turn. In a mixture each environment is
    sure of its part (`actor/environments/environment_pool.py`), so that one that hangs leaves the others theirs."""
    max_in_flight: CountOrZero = 0
    """Episodes that an actor has begun and not ended at once, those in their environments included, where that is to be
    more than actor.max_num_seqs: an episode that waits for its environment is not in the engine, and another can be.
    About max_num_seqs * (1 + the environment's time / the engine's), a turn; those that are ready at once wait inside
    the engine. admission.sequences bounds a window as ever, and max_processes should be as large. 0: max_num_seqs."""
    max_memory_gib: Positive = 4.0
    """Address space of one episode's process."""
    python: ActorCommand = ""
    """Interpreter of `verifiers` and of environments of your own whose libraries don't go together with the engine's:
    one of a virtual environment that has them, msgspec and jinja2. Empty: the actor's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(CheckedSection):
    """How the actors sample."""

    max_response_tokens: Count = 16
    """Tokens that a response, or a turn of an episode, may have."""
    temperature: Finite = 1.0
    top_p: Fraction = 1.0
    top_k: CountOrZero = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        temperature("sampling", self.temperature)  # 0 too is refused: a greedy choice has no ratio
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                "sampling.top_p and sampling.top_k must stay 1.0 and 0: importance ratios need the learner's "
                f"distribution truncated alike, got top_p={self.top_p} top_k={self.top_k}"
            )
