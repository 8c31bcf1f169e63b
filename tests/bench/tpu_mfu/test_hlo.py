"""Work of HLO programs against sums by hand."""

import pytest

from tests.bench.tpu_mfu import hlo
from tests.bench.tpu_mfu.__main__ import kernel_flops

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %inner = f32[8,4]{1,0} add(%p, %p), backend_config={"estimated_cycles":"999"}
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %step = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %sum = f32[8,4]{1,0} all-reduce(%step), replica_groups=[2,4]<=[8], to_apply=%add
  %kernel.3 = f32[8,4]{1,0} custom-call(%sum), custom_call_target="tpu_custom_call"
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%i, %kernel.3)
}

%condition (state: (s32[], f32[8,4])) -> pred[] {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(28)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[8,4]{1,0}) while(%start), condition=%condition, body=%body
  %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %all = f32[32,4]{1,0} all-gather(%out), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %last = f32[8,4]{1,0} fusion(%out), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"7"}
}
"""


def test_loops_count_as_often_as_they_run_and_fusions_once():
    work = hlo.work(PROGRAM)
    assert work.cycles == 28 * 100 + 7 and work.unknown_loops == ()
    array = 8 * 4 * 4
    assert work.sent_bytes == 28 * array * 2 * 3 / 4 + 4 * array * 3 / 4
    assert work.kernels == (hlo.Kernel("kernel", ((8, 4),), ((8, 4),), 28.0),)


def test_a_loop_without_a_constant_bound_counts_once_and_is_named():
    work = hlo.work(PROGRAM.replace("%n = s32[] constant(28)", "%n = s32[] partition-id()"))
    assert work.cycles == 100 + 7 and work.unknown_loops == ("loop",)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="without an ENTRY computation"):
        hlo.work("nothing")


def test_flops_of_kernels_by_hand():
    q = (28, 1024, 128)
    forward = hlo.Kernel("splash_mha_fwd_residuals", ((4, 8), q, (4, 1024, 128), (4, 1024, 128)), (q,), 1.0)
    assert kernel_flops(forward) == 2 * 2 * 28 * 1024 * 128 * 512
    rows = hlo.Kernel("gmm", ((8,), (4096, 2048), (128, 768, 2048)), ((4096, 768),), 1.0)
    assert kernel_flops(rows) == 2 * 4096 * 2048 * 768
    with pytest.raises(ValueError, match="'other': its FLOPs are not known"):
        kernel_flops(hlo.Kernel("other", (), (), 1.0))
