"""What is recomputed: the estimate of its memory against XLA's own analysis, and the choice."""

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from configs import schema, sections
from learner.distributed.channel import SingleProcess
from learner.distributed.sharding import make_mesh
from learner.metrics import flops
from learner.model import hf_save
from learner.model.architecture import Architecture
from learner.restore import WeightLoader, load_base, trainer_of
from learner.update import auto_remat
from learner.update.auto_remat import CHOICES, POLICIES, DeviceShare, kept_per_token, micro_batch_bytes
from learner.update.critic_step import build_critic_step
from learner.update.train_step import build_train_step
from tests.learner import several_hosts, streams
from tests.learner.publish.thread_hosts import ThreadHosts

MODEL = Architecture(
    model_type="qwen3",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    max_position_embeddings=4096,
    qkv_bias=False,
    o_bias=False,
)


def config_of(remat, *, param_dtype: Any = "float32", lora=None, **optimizer: Any):
    return schema.Config(
        preset="test",
        model=sections.ModelConfig(max_tokens=512, remat=remat, param_dtype=param_dtype),
        optimizer=sections.OptimizerConfig(**optimizer),
        lora=lora or sections.LoraConfig(),
        sampling=sections.SamplingConfig(max_response_tokens=256),
        packing=sections.PackingConfig(rows=8, row_tokens=512),
    )


def mesh_of():
    return make_mesh(devices=jax.devices()[:1])


def test_kept_per_token_by_hand():
    # Input 64; attention's output 64; queries 64, keys and values 32 each, output 64, gate and up 256 each, down 64.
    assert kept_per_token(MODEL, "full") == 64
    assert kept_per_token(MODEL, "attention") == 128
    assert kept_per_token(MODEL, "gate") == 128 + 64 + 2 * 32 + 64 + 256
    assert kept_per_token(MODEL, "dots") == 128 + 64 + 2 * 32 + 64 + 2 * 256
    assert kept_per_token(MODEL, "dots", tensor=2) == 64 + 32 + 32 + 32 + 64 + 256
    with pytest.raises(ValueError, match="remat: expected one of .*, got 'half'"):
        kept_per_token(MODEL, "half")  # pyright: ignore[reportArgumentType]


@pytest.mark.heavy
def test_estimates_are_near_and_in_the_order_of_xlas_analysis():
    measured, estimated = {}, {}
    for policy in CHOICES:
        steps = build_train_step(MODEL, config_of(policy), mesh_of())
        analysis: Any = steps.lower()["accumulate"].compile().memory_analysis()
        measured[policy] = analysis.temp_size_in_bytes
        num_params = sum(x.size for x in jax.tree.leaves(steps.abstract_state().params))
        share = DeviceShare(num_tokens=8 * 512, activation_bytes=4)
        estimated[policy] = micro_batch_bytes(MODEL, policy, share, num_params=num_params)
    for policy in CHOICES:
        assert 0.5 < estimated[policy] / measured[policy] < 2, (policy, estimated, measured)
    for more, less in zip(CHOICES, CHOICES[1:], strict=False):
        assert measured[more] > measured[less] and estimated[more] > estimated[less]


@pytest.mark.parametrize(("usable", "want"), [(1e12, "dots"), (0.0, "full")])
def test_auto_takes_what_computes_least_of_what_fits(usable, want):
    chosen = auto_remat.first_that_fits(MODEL, config_of("auto"), mesh_of(), logit_chunk=128, usable=usable)
    assert chosen == want


def test_auto_between_two_needs_takes_the_smaller():
    needs = {}
    share = DeviceShare(num_tokens=8 * 512, activation_bytes=4)
    shapes = build_train_step(MODEL, config_of("dots"), mesh_of()).abstract_state().params
    num_params = sum(x.size for x in jax.tree.leaves(shapes))
    for policy in POLICIES:
        needs[policy] = 16 * num_params + micro_batch_bytes(MODEL, policy, share, num_params=num_params)
    usable = (needs["attention"] + needs["dots"]) / 2
    got = auto_remat.first_that_fits(MODEL, config_of("auto"), mesh_of(), logit_chunk=128, usable=usable)
    assert got == "attention"


def test_auto_counts_the_tokens_that_a_teacher_compares(monkeypatch):
    for name, num_bytes in (("state_bytes", 0), ("frozen_bytes", 0), ("micro_batch_bytes", 1000)):
        monkeypatch.setattr(auto_remat, name, lambda *args, num_bytes=num_bytes, **kwargs: num_bytes)
    loss = sections.LossConfig(teacher_coef=1.0, teacher_path="t", teacher_divergence="forward_kl", teacher_top_k=8)
    config = dataclasses.replace(config_of("auto"), loss=loss)
    need = 1000 + 16 * 8 * (8 * 512)

    def chosen(usable):
        return auto_remat.first_that_fits(MODEL, config, mesh_of(), logit_chunk=128, usable=usable)

    assert (chosen(need), chosen(need - 1)) == ("dots", "full")


OPTIMIZERS = (
    {"name": "adamw", "mu_dtype": "float32"},
    {"name": "adamw", "mu_dtype": "bfloat16"},
    {"name": "adafactor"},
    {"name": "muon", "mu_dtype": "bfloat16", "nu_dtype": "bfloat16"},
)


@pytest.mark.heavy
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("rank", [0, 8])
def test_state_is_what_the_learner_really_keeps(monkeypatch, param_dtype, optimizer, rank):
    """Measured from arrays that the steps make; auto's threshold moves with them by as much."""
    config = config_of("dots", param_dtype=param_dtype, lora=sections.LoraConfig(rank=rank), **optimizer)
    steps = build_train_step(MODEL, config, mesh_of())
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), steps.abstract_state().params)
    state = steps.init(params)
    kept = state.params, state.opt_state, state.accumulator.grads
    real = sum(x.nbytes for x in jax.tree.leaves(kept))
    num_trained = sum(x.size for x in jax.tree.leaves(state.params))
    base = sum(x.size for x in jax.tree.leaves(steps.abstract_base())) if rank else 0
    monkeypatch.setattr(auto_remat, "micro_batch_bytes", lambda *args, num_params: {num_trained: 1000}[num_params])
    need = real + 4 * base + 1000  # a base is held in float32, beside no moments and no accumulator

    def chosen(usable):
        return auto_remat.first_that_fits(MODEL, config, mesh_of(), logit_chunk=128, usable=usable)

    assert (chosen(need), chosen(need - 1)) == ("dots", "full")


@pytest.mark.heavy
def test_state_of_a_critic_stays_and_its_micro_batch_comes_before_the_policys(monkeypatch):
    config = dataclasses.replace(config_of("dots"), loss=sections.LossConfig(advantage="gae"))
    steps = build_train_step(MODEL, config, mesh_of())
    critic = build_critic_step(MODEL, config, mesh_of(), steps)
    assert critic is not None
    states = [one.abstract_state() for one in (steps, critic)]
    sizes = [sum(x.size for x in jax.tree.leaves(state.params)) for state in states]
    assert sizes[1] - sizes[0] == MODEL.hidden_size + 1
    kept = jax.tree.leaves([(s.params, s.opt_state, s.accumulator.grads) for s in states])
    of_micro_batch = dict(zip(sizes, (400, 1000), strict=True))
    monkeypatch.setattr(auto_remat, "micro_batch_bytes", lambda *args, num_params: of_micro_batch[num_params])
    need = sum(x.size * x.dtype.itemsize for x in kept) + 1000

    def chosen(usable):
        return auto_remat.first_that_fits(MODEL, config, mesh_of(), logit_chunk=128, usable=usable)

    assert (chosen(need), chosen(need - 1)) == ("dots", "full")


def test_state_by_hand_for_bfloat16_parameters_with_float32_moments():
    # Weights 2, first moment 4, second 4, accumulator 4; and two counters of 4 bytes.
    config = config_of("dots", param_dtype="bfloat16")
    params = {"kernel": jax.ShapeDtypeStruct((3, 5), "bfloat16")}
    assert auto_remat.state_bytes(params, config) == 15 * 14 + 8


@pytest.mark.heavy
def test_adapters_alone_have_moments_and_their_base_is_frozen():
    adapters = {"a": jax.ShapeDtypeStruct((8, 64), "float32")}
    config = config_of("dots", lora=sections.LoraConfig(rank=8))
    assert auto_remat.state_bytes(adapters, config) == 8 * 64 * 16 + 8
    whole, lora = (needed_bytes(config_of("dots", lora=sections.LoraConfig(rank=r))) for r in (0, 8))
    num_all = sum(
        x.size for x in jax.tree.leaves(build_train_step(MODEL, config_of("dots"), mesh_of()).abstract_state().params)
    )
    num_adapters = flops.adapter_params(MODEL, config.lora)
    # Of the model's 16 bytes a parameter and its gradient's 4 a frozen base keeps 4; each adapter's number has all 20.
    assert whole - lora == pytest.approx(16 * num_all - 20 * num_adapters, abs=64)


FROZEN: dict[str, dict[str, Any]] = {
    "nothing": dict(loss={}),
    "reference": dict(loss=dict(kl_coef=0.1)),
    "proximal": dict(loss=dict(name="decoupled_ppo", proximal="round")),
    "both": dict(loss=dict(name="decoupled_ppo", proximal="round", kl_coef=0.1)),
    "proximal of its own passes": dict(loss=dict(name="decoupled_ppo"), epochs=2),
    "base": dict(loss={}, rank=2),
    "base as the reference": dict(loss=dict(kl_coef=0.1), rank=2),
    "base and another reference": dict(loss=dict(kl_coef=0.1, reference_path="here"), rank=2),
    "base and adapters": dict(loss=dict(name="decoupled_ppo", proximal="round"), rank=2),
    "all": dict(loss=dict(name="decoupled_ppo", proximal="round", kl_coef=0.1, reference_path="here"), rank=2),
}


@pytest.mark.heavy
@pytest.mark.parametrize(("kept", "compute_dtype"), [*((kept, "bfloat16") for kept in FROZEN), ("all", "float32")])
def test_frozen_copies_are_counted_as_the_learner_holds_them(monkeypatch, tmp_path, kept, compute_dtype):
    """Measured from the arrays that a trainer really has, each once; auto's threshold moves with them by as much."""
    setting: dict[str, Any] = {"rank": 0, "epochs": 1} | FROZEN[kept]
    folder = tmp_path / "model"
    hf_save.save(folder, streams.MODEL, streams.fresh_params())
    loss = setting["loss"] | ({"reference_path": str(folder)} if "reference_path" in setting["loss"] else {})
    config = streams.config_of(epochs=setting["epochs"], **loss)
    model = dataclasses.replace(config.model, compute_dtype=compute_dtype, served_dtype=compute_dtype)
    config = dataclasses.replace(config, lora=sections.LoraConfig(rank=setting["rank"]), model=model)
    steps, weights = build_train_step(streams.MODEL, config, mesh_of()), WeightLoader(config, streams.MODEL)
    base = load_base(weights, folder)
    state = steps.init(steps.init_adapters() if base else weights.load(folder, "float32"))
    parts: Any = dict(publisher=None, checkpoints=None)
    trainer = trainer_of(config, streams.MODEL, steps, state, weights, folder, base=base, **parts)

    trained = jax.tree.leaves((state.params, state.opt_state, state.accumulator.grads))
    copies = jax.tree.leaves((trainer.frozen, trainer.anchors._reference, trainer.anchors._proximal))
    assert bool(copies) == (kept not in ("nothing", "proximal of its own passes"))
    need = sum({id(x): x.nbytes for x in trained + copies}.values()) + 1000
    monkeypatch.setattr(auto_remat, "micro_batch_bytes", lambda *args, num_params: 1000)

    def chosen(usable):
        return auto_remat.first_that_fits(streams.MODEL, config, mesh_of(), logit_chunk=128, usable=usable)

    assert (chosen(need), chosen(need - 1)) == ("dots", "full")


def needed_bytes(config):
    """The least memory for which `dots` is chosen, by bisection."""
    low, high = 0, 2**34
    while high - low > 1:
        middle = (low + high) // 2
        fits = auto_remat.first_that_fits(MODEL, config, mesh_of(), logit_chunk=128, usable=middle) == "dots"
        low, high = (low, middle) if fits else (middle, high)
    return high


def test_auto_without_a_stated_memory_is_attention_and_steps_say_so(monkeypatch):
    monkeypatch.setattr(auto_remat, "usable_bytes", lambda mesh, hosts, wait_s: None)
    assert build_train_step(MODEL, config_of("auto"), mesh_of()).remat == "attention"


@pytest.mark.parametrize(("hidden", "want"), [(256, "attention"), (576, "dots")])
def test_auto_on_a_cpu_keeps_projections_only_of_wide_models(monkeypatch, hidden, want):
    monkeypatch.setattr(auto_remat, "usable_bytes", lambda mesh, hosts, wait_s: 1e12)
    model = dataclasses.replace(MODEL, hidden_size=hidden)
    assert auto_remat.choose_remat(model, config_of("auto"), mesh_of(), SingleProcess(), logit_chunk=128) == want


def test_a_named_policy_is_taken_whatever_memory_there_is(monkeypatch):
    monkeypatch.setattr(auto_remat, "usable_bytes", lambda mesh, hosts, wait_s: 0.0)
    assert build_train_step(MODEL, config_of("none"), mesh_of()).remat == "none"


def test_host_bytes_is_the_containers_where_that_is_less(tmp_path):
    limit = tmp_path / "auto_remat.max"
    whole = auto_remat.host_bytes(limit)  # there is none
    limit.write_text("1048576\n")
    assert auto_remat.host_bytes(limit) == 1048576
    limit.write_text("max\n")
    assert auto_remat.host_bytes(limit) == whole > 1048576


def test_usable_bytes_of_a_cpu_is_a_share_for_each_of_its_devices(monkeypatch):
    monkeypatch.setattr(auto_remat, "host_bytes", lambda: 1000)
    assert auto_remat.usable_bytes(mesh_of(), SingleProcess(), wait_s=1) == pytest.approx(1000 * auto_remat.HOST_SHARE)


class Chip:
    """A device that only its own process may ask, which runs in a thread of that name."""

    platform, device_kind = "gpu", "H100"

    def __init__(self, process_index: int, limit: int | None) -> None:
        self.process_index, self._limit = process_index, limit

    def memory_stats(self) -> dict[str, int] | None:
        if threading.current_thread().name != str(self.process_index):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices")
        return None if self._limit is None else {"bytes_limit": self._limit}


class Core(Chip):
    platform, device_kind = "cpu", "cpu"


def usable_by_process(mesh: Any, count: int) -> list[float | None]:
    """What each of so many processes hears, each in a thread."""
    got: dict[int, float | None] = {}

    def ask(hosts: ThreadHosts) -> None:
        got[hosts.index] = auto_remat.usable_bytes(mesh, hosts, wait_s=30)

    threads = [threading.Thread(target=ask, args=(hosts,), name=str(hosts.index)) for hosts in ThreadHosts.of(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[i] for i in range(count)]


def mesh_like(*devices: Chip) -> Any:
    return SimpleNamespace(devices=np.array(devices, dtype=object))


@pytest.mark.parametrize(("limits", "want"), [((1000, 800), 800), ((800, 1000), 800), ((1000, None), None)])
def test_usable_bytes_of_processes_with_unequal_devices_is_the_least_in_all(limits, want):
    mesh = mesh_like(*(Chip(i // 2, limits[i // 2]) for i in range(4)))
    want = None if want is None else want * auto_remat.DEVICE_SHARE
    assert usable_by_process(mesh, 2) == [want, want]


@pytest.mark.parametrize(
    ("names", "want"), [(("a", "a", "a"), 1000 / 6), (("a", "b", "a"), 1000 / 4), (("a", "b", "c"), 600 / 2)]
)
def test_usable_bytes_of_cpu_processes_of_one_host_is_shared_by_all_their_devices(monkeypatch, names, want):
    def mine() -> int:
        return int(threading.current_thread().name)

    monkeypatch.setattr(auto_remat.platform, "node", lambda: names[mine()])
    sizes = (1000, 1000, 1000) if len(set(names)) < 3 else (1000, 600, 1000)
    monkeypatch.setattr(auto_remat, "host_bytes", lambda: sizes[mine()])
    mesh = mesh_like(*(Core(i // 2, None) for i in range(6)))
    assert usable_by_process(mesh, 3) == [pytest.approx(want * auto_remat.HOST_SHARE)] * 3


def test_usable_bytes_of_chips_that_are_only_compiled_for_is_their_kinds():
    class Compiled(Chip):
        platform, device_kind = "tpu", "TPU v5 lite"

    mesh = mesh_like(*(Compiled(i // 4, None) for i in range(16)))  # in one process, which has none of them
    want = flops.TPU_CHIPS["v5e"].hbm_bytes * auto_remat.DEVICE_SHARE
    assert auto_remat.usable_bytes(mesh, SingleProcess(), wait_s=1) == want


AGREE = (
    several_hosts.CONNECT
    + """
import dataclasses
from learner.distributed.sharding import make_mesh
from learner.update import auto_remat
from learner.update.train_step import build_train_step
from tests.learner.update.test_choose_remat import MODEL, config_of

# A large machine, and one that is too small for anything.
auto_remat.host_bytes = lambda: 2**40 if hosts.is_leader else 0
model = dataclasses.replace(MODEL, hidden_size=512)
print(build_train_step(model, config_of("auto"), make_mesh(fsdp=4), hosts).remat)
try:
    build_train_step(model, config_of("auto"), make_mesh(fsdp=4))
except ValueError as e:
    print(e)
"""
)


@pytest.mark.heavy
def test_auto_in_two_processes_on_unlike_machines_is_one_policy():
    for out in several_hosts.run(AGREE, count=2, devices_each=2):
        remat, refusal = out.splitlines()[-2:]
        assert remat == "full"
        assert "expected hosts of all 2 processes" in refusal
