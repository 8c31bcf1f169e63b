"""Every recipe is a whole run, with any of the schedules, and the ones for accelerators are of a slice."""

import math
import pathlib

import pytest

from configs import overrides, run_folder
from configs.model_sizes import MODEL_SIZES
from configs.presets import PRESETS
from configs.presets.tpu import CASES
from tests.configs.test_overrides import PRESETS as KNOWN

FOLDER = pathlib.Path(overrides.__file__).parent / "recipes"
RECIPES = sorted(p.stem for p in FOLDER.glob("*.py") if "def get_config" in p.read_text())
RESULTS = FOLDER.parents[1] / "tests/bench/results/tpu.md"
COMPILED = ("gsm8k_qwen2_5_1_5b", "countdown_qwen2_5_3b", "deepscaler_qwen3_4b")
ON_CPU = {"arithmetic_smollm2", "arithmetic_smollm2_curriculum", "gsm_smollm2"}
WARM = ("arithmetic_smollm2", "gsm_smollm2")
"""Recipes with a warm start."""


def test_recipes_are_those_of_the_page():
    assert set(RECIPES) == ON_CPU | {"gsm8k_qwen2_5_1_5b", "deepscaler_qwen3_4b", "countdown_qwen2_5_3b"}
    assert set(PRESETS) == set(KNOWN)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_loads_with_every_schedule(recipe, preset):
    config = overrides.load_preset(f"{recipe}:{preset}")
    whole = overrides.load_preset(recipe)
    assert config.preset == preset and config.run.name.endswith(preset)
    assert (config.model, config.prompts, config.packing) == (whole.model, whole.prompts, whole.packing)
    rounds = config.rounds
    assert (rounds.samples_per_group, rounds.groups_per_round % rounds.groups_per_update) == (8, 0)
    assert config.admission.sequences in (0, rounds.groups_per_round * 8)
    assert config.loss.overlong_tokens == 0
    assert config.packing.rows % math.prod(config.mesh.axes.values()) == 0 or recipe in ON_CPU


def test_recipe_with_a_schedule_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no preset 'ppo'; expected one of serial, cgp"):
        overrides.load_preset("arithmetic_smollm2:ppo")


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - ON_CPU))
def test_recipe_for_accelerators_is_a_case_of_compile_tpu_with_a_mesh_of_its_slice(recipe):
    (case,) = [c for c in CASES if c.preset == recipe]
    config = overrides.load_preset(case.config_path)
    assert case.is_recipe and case.model in MODEL_SIZES
    assert pathlib.Path(config.model.path).name.startswith(case.model)
    shape = case.topology.partition(":")[2].split("x")
    assert math.prod(config.mesh.axes.values()) == math.prod(map(int, shape))
    assert config.model.max_tokens <= MODEL_SIZES[case.model]["max_position_embeddings"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_evaluates_by_enough_responses_and_at_a_bounded_cost(recipe):
    config = overrides.load_preset(recipe)
    (held_out,) = config.evaluation_sets.values()
    num_responses = held_out.num_problems * held_out.k
    # Of a coin, so many responses are known to 1 / (2 sqrt(192)) = 0.036.
    assert num_responses >= 192 and (held_out.k == 1) == (held_out.num_problems >= 192)
    trained = config.evaluation.every_n_steps * config.rounds.groups_per_update * config.rounds.samples_per_group
    assert num_responses <= (1.0 if recipe in ON_CPU else 0.15) * trained


def test_aime_is_sampled_as_it_is_reported():
    (held_out,) = overrides.load_preset("deepscaler_qwen3_4b").evaluation_sets.values()
    assert (held_out.num_problems, held_out.k, held_out.temperature, held_out.top_p) == (30, 16, 0.6, 0.95)


@pytest.mark.parametrize("recipe", COMPILED)
def test_stored_result_of_a_compiled_recipe_is_of_its_mesh_and_shape_as_they_are_now(recipe):
    (case,) = [c for c in CASES if c.preset == recipe]
    config = overrides.load_preset(case.config_path)
    (row,) = [line for line in RESULTS.read_text().splitlines() if line.startswith(f"|{case.key} |")]
    _, mesh, shape, _, fits, *_ = [cell.strip() for cell in row.strip("|").split("|")]
    assert mesh == " x ".join(f"{name} {size}" for name, size in config.mesh.axes.items() if size > 1)
    assert shape == f"{config.packing.rows} x {config.packing.row_tokens}" and fits == "yes"


def test_preset_that_is_not_there_names_the_recipes_too():
    with pytest.raises(ValueError, match="arithmetic_smollm2"):
        overrides.load_preset("configs/nosuch.py")


@pytest.mark.parametrize("recipe", WARM)
def test_recipe_starts_from_the_model_that_its_warm_start_writes_(recipe):
    warm, config = overrides.load_preset(f"{recipe}:sft"), overrides.load_preset(recipe)
    assert warm.loss.is_supervised and warm.prompts.system_prompt == config.prompts.system_prompt
    assert {s.path for s in warm.prompts.sources.values()} <= {s.path for s in config.prompts.sources.values()}
    written = run_folder.RunFolder(pathlib.Path("runs") / warm.run.name).model(warm.run.num_updates)
    assert pathlib.Path(config.model.path) == written
