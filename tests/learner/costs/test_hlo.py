# ruff: noqa: E501  (lines of HLO are long)
"""Counts from HLO text: against numbers worked out from a program written here, and real programs on 8 CPU devices."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from learner.costs import hlo, hlo_costs

REPO = pathlib.Path(__file__).resolve().parents[3]

# A loop of 5 runs over a matmul, an all-gather and an async permute; a scatter-reduce fusion and a step of a fused
# collective outside, as a TPU's compiler writes them.
TPU_TEXT = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[8,64]{1,0})->bf16[8,64]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[128,64]) -> f32[32,64] {
  %input = f32[128,64]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[128,64]{1,0:T(8,128)} all-reduce(%input), channel_id=3, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %slice = f32[32,64]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={32,64}
}

%async_collective_fusion.1 (p: bf16[2,64]) -> bf16[8,64] {
  %p = bf16[2,64]{1,0} parameter(0)
  ROOT %gather.7 = bf16[8,64]{1,0} all-gather(%p), channel_id=9, replica_groups=[2,4]<=[2,4], dimensions={0}
}

%async_collective_fusion.2 (p.2: bf16[2,64]) -> bf16[8,64] {
  %p.2 = bf16[2,64]{1,0} parameter(0)
  ROOT %gather.8 = bf16[8,64]{1,0} all-gather(%p.2), channel_id=9, replica_groups=[2,4]<=[2,4], dimensions={0}
}

%body (carry: (s32[], bf16[8,64], bf16[16,64])) -> (s32[], bf16[8,64], bf16[16,64]) {
  %carry = (s32[], bf16[8,64]{1,0}, bf16[16,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = bf16[8,64]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[16,64]{1,0:T(8,128)S(1)} get-tuple-element(%carry), index=2
  %all-gather.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}, frontend_attributes={note={
"a": "b"
}}, metadata={op_name="jit(f)/while/body/dot_general"}
  %convolution.1 = bf16[8,64]{1,0} convolution(%x, %all-gather.1), dim_labels=bf_io->bf, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %start = (bf16[8,64]{1,0}, bf16[8,64]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%convolution.1), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %done = bf16[8,64]{1,0} collective-permute-done(%start)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[8,64]{1,0}, bf16[16,64]{1,0}) tuple(%next, %done, %w)
}

%condition (c: (s32[], bf16[8,64], bf16[16,64])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %c = (s32[], bf16[8,64]{1,0}, bf16[16,64]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %bound), direction=LT
}

ENTRY %main (param: bf16[8,64], weight: bf16[16,64], grad: f32[128,64], part: bf16[2,64]) -> bf16[8,64] {
  %param = bf16[8,64]{1,0} parameter(0)
  %weight = bf16[16,64]{1,0} parameter(1)
  %grad = f32[128,64]{1,0} parameter(2)
  %part = bf16[2,64]{1,0} parameter(3)
  %start.0 = s32[] constant(0)
  %tuple = (s32[], bf16[8,64]{1,0}, bf16[16,64]{1,0}) tuple(%start.0, %param, %weight)
  %scattered = f32[32,64]{1,0} fusion(%grad), kind=kCustom, calls=%all-reduce-scatter.1
  %step.1 = bf16[8,64]{1,0} fusion(%part), kind=kCustom, calls=%async_collective_fusion.1
  %step.2 = bf16[8,64]{1,0} fusion(%part), kind=kCustom, calls=%async_collective_fusion.2
  %kernel.3 = bf16[8,64]{1,0} custom-call(%step.2, %part), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 128}"
}}, backend_config={"custom_call_config":{"body":"QUJD(((","x":1}}
  %while.1 = (s32[], bf16[8,64]{1,0}, bf16[16,64]{1,0}) while(%tuple), condition=%condition, body=%body
  ROOT %result = bf16[8,64]{1,0} get-tuple-element(%while.1), index=1
}
"""


def test_costs_of_a_tpu_text_are_those_worked_out_by_hand():
    found = hlo_costs.costs(hlo.parse(TPU_TEXT))
    assert found.unknown_loops == ()
    assert found.matmul_flops == 5 * 2 * 8 * 64 * 64
    assert found.estimated_cycles == 5 * 1000
    by_kind = {c.kind: c for c in found.collectives}
    assert sorted(c.kind for c in found.collectives) == [
        "all-gather",
        "all-gather",
        "collective-permute",
        "reduce-scatter",
    ]
    scatter = by_kind["reduce-scatter"]
    assert (scatter.num_bytes, scatter.group, scatter.runs) == (128 * 64 * 4, (0, 1, 2, 3), 1)
    assert scatter.sent_bytes == 128 * 64 * 4 * 3 / 4
    permute = by_kind["collective-permute"]
    assert (permute.num_bytes, permute.runs, permute.is_async) == (8 * 64 * 2, 5, True)
    in_loop, spread = sorted((c for c in found.collectives if c.kind == "all-gather"), key=lambda c: -c.runs)
    assert (in_loop.num_bytes, in_loop.runs, in_loop.is_async) == (64 * 64 * 2, 5, False)
    assert in_loop.op_name == "jit(f)/while/body/dot_general"
    # Two fusions name the one collective that is spread over them.
    assert (spread.num_bytes, spread.runs, spread.is_async) == (8 * 64 * 2, 1, True)
    (kernel,) = found.kernels
    assert (kernel.name, kernel.operands, kernel.results) == ("kernel", ((8, 64), (2, 64)), ((8, 64),))


def test_costs_of_a_tpu_text_leave_fast_memory_out_of_hbm_bytes():
    found = hlo_costs.costs(hlo.parse(TPU_TEXT))
    activation, gathered = 8 * 64 * 2, 64 * 64 * 2
    # The gathered weight's input is in fast memory; the permute has two buffers and flags in scalar memory.
    in_loop = gathered + (activation + gathered + activation) + 2 * activation
    scatter, steps = 128 * 64 * 4 + 32 * 64 * 4, 2 * (2 * 64 * 2 + activation)
    kernel = activation + 2 * 64 * 2 + activation
    # The add of the loop counter reads two numbers and writes one.
    assert found.hbm_bytes == 5 * (in_loop + 12) + scatter + steps + kernel


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
    ],
)
def test_collective_group_is_read_in_every_notation(attributes, group):
    text = TPU_TEXT.replace("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", attributes)
    found = [c for c in hlo_costs.costs(hlo.parse(text)).collectives if c.kind == "all-gather" and c.runs == 5]
    assert [c.group for c in found] == [group]


def test_trip_count_of_a_bound_handed_in_is_found_and_one_of_data_is_not():
    handed_in = TPU_TEXT.replace("%bound = s32[]{:T(128)} constant(5)", "%bound = s32[] get-tuple-element(%c), index=3")
    for old in ("(s32[], bf16[8,64]{1,0}, bf16[16,64]{1,0}) ", "(s32[], bf16[8,64], bf16[16,64])"):
        new = old.replace(")", ", s32[])", 1) if old.endswith(") ") else old[:-1] + ", s32[])"
        handed_in = handed_in.replace(old, new)
    known = handed_in.replace("tuple(%start.0, %param, %weight)", "tuple(%start.0, %param, %weight, %limit)")
    known = known.replace("%start.0 = s32[] constant(0)", "%start.0 = s32[] constant(0)\n  %limit = s32[] constant(7)")
    assert hlo_costs.costs(hlo.parse(known)).estimated_cycles == 7 * 1000
    data = known.replace("%limit = s32[] constant(7)", "%limit = s32[] parameter(4)")
    found = hlo_costs.costs(hlo.parse(data), dynamic_trips=3)
    assert (found.estimated_cycles, found.unknown_loops) == (3 * 1000, ("while.1",))


def test_convolution_flops_leave_out_what_meets_padding():
    # Two matrices side by side: 4 places, of which a kernel of 4 with padding 3 meets one each way.
    line = "  %convolution.1 = bf16[8,64]{1,0} convolution(%x, %all-gather.1), dim_labels=bf_io->bf"
    spatial = (
        "  %lhs = bf16[32,16,4]{2,1,0} constant({...})\n  %rhs = bf16[4,16,128]{2,1,0} constant({...})\n"
        "  %convolution.1 = bf16[32,4,128]{2,1,0} convolution(%lhs, %rhs), "
        "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0io->b0f"
    )
    text = TPU_TEXT.replace(line, spatial.replace("bf16[32,4,128]", "bf16[32,7,128]").replace("->b0f", "->b0f"))
    pairs = 4 * 4  # each of 4 inputs meets each of 4 kernel places once
    assert hlo_costs.costs(hlo.parse(text)).matmul_flops == 5 * 2 * 32 * 16 * 128 * pairs


def test_parse_of_something_else_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("module @jit_f {}")


def test_costs_of_a_scanned_matmul_count_every_run():
    """XLA's own analysis counts the loop's body once: that is the reason for this module."""
    length, n = 7, 64

    def f(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=length)[0]

    shape = jax.ShapeDtypeStruct((n, n), jnp.float32)
    compiled = jax.jit(f).lower(shape, shape).compile()
    found = hlo_costs.costs(hlo.parse(compiled.as_text() or ""))
    analysis = compiled.cost_analysis()
    assert analysis is not None and analysis["flops"] < 2 * 2 * n**3
    assert found.unknown_loops == ()
    assert found.matmul_flops == length * 2 * n**3


SHARDED = """
import json, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from learner.costs import hlo, hlo_costs

mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def local(x, w):
    def one(x, w):
        whole = jax.lax.all_gather(w, "b", tiled=True)
        return jax.lax.psum(jnp.tanh(x @ whole), "a"), None
    x, _ = jax.lax.scan(one, x, w)
    x = jax.lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
    x = jax.lax.all_to_all(x, "b", split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)])

f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "b")), out_specs=P("a", "b"), check_vma=False)
x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
w = jax.ShapeDtypeStruct((3, 32, 32), jnp.float32)
costs = hlo_costs.costs(hlo.parse(jax.jit(f).lower(x, w).compile().as_text()))
print(json.dumps([[c.kind, c.num_bytes, c.runs, list(c.group)] for c in costs.collectives]))
"""


def test_collectives_of_a_real_sharded_program_are_found_with_their_groups():
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], cwd=REPO, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {kind: (num_bytes, runs, tuple(group)) for kind, num_bytes, runs, group in json.loads(done.stdout)}
    along_b = (0, 1, 2, 3)
    assert found["all-gather"] == (32 * 32 * 4, 3, along_b)
    assert found["all-reduce"] == (64 * 32 * 4, 3, (0, 4))
    assert found["reduce-scatter"] == (64 * 32 * 4, 1, along_b)
    assert found["all-to-all"] == (16 * 32 * 4, 1, along_b)
    assert found["collective-permute"] == (4 * 128 * 4, 1, (0, 1))
