"""What the planner is told of the recipes for accelerators, and the page's table of what it says."""

import json

import pytest

from launch.tools.plan import profile
from tests.bench.planner.recipes import ASSUMED, FOLDER, PAGE, profile_of, table

GSM8K = "gsm8k_qwen2_5_1_5b"


def test_engine_reads_weights_and_caches_at_its_memorys_rate():
    engine = profile_of(GSM8K)["engine"]
    assert profile.from_dict(profile_of(GSM8K)).engine.max_num_seqs == 256
    # Qwen2.5-1.5B has 1.54e9 parameters, 28 layers of 2 heads of 128; a sequence has 165 + 110 tokens at its middle.
    bytes_per_s = 0.7 * 3.35e12
    alone, full = engine["tokens_per_s"][0], engine["tokens_per_s"][-1]
    assert alone == pytest.approx(1 / (0.003 + 3.087e9 / bytes_per_s), rel=0.01)
    assert full == pytest.approx(256 / (0.003 + (3.087e9 + 256 * 275 * 28_672) / bytes_per_s), rel=0.01)
    assert engine["kv_capacity_tokens"] == pytest.approx((0.9 * 80e9 - 4e9 - 3.087e9) / 28_672, rel=0.01)


def test_learner_takes_the_flops_of_a_token_at_half_of_the_peak():
    learner = profile_of(GSM8K)["learner"]
    # Qwen2.5-1.5B has 1.31e9 parameters in its layers (four times 2 FLOPs a token with the forward pass of remat) and
    # 0.233e9 in its head, which sees 1024 of the longest sequence's 1536 tokens; attention is 2 x 1536 x 28 x 1536.
    flops = 8 * 1.31e9 + 6 * 0.233e9 * 1024 / 1536 + 3 * 2 * 1536 * 28 * 1536
    assert learner["seconds_per_token"] == pytest.approx(flops / (197e12 * 0.5), rel=0.01)


@pytest.mark.parametrize("recipe", ASSUMED)
def test_stored_profile_is_of_the_recipe_as_it_is_now(recipe):
    """But for the store, which is measured anew with the cluster's."""
    stored, now = json.loads((FOLDER / f"{recipe}.json").read_text()), profile_of(recipe)
    assert stored.pop("store").keys() == now.pop("store").keys() and stored == now


@pytest.mark.nightly
def test_pages_table_is_what_the_planner_says():
    assert table() in PAGE.read_text()
