"""How far from on-policy are responses whose weights change in flight? PipelineRL's Figure 7.

    python -m tests.bench.mixed_policy [--dir=FOLDER] [--small]

Section 5.1 of the paper: consecutive checkpoints C to C + g of one run (here `tiny_code`, an update a round), sampled
by transformers at temperature 1 in float32. *In flight*: a response begins with C's weights and gets the next ones
every L / g tokens (the first after 2 L / g), its KV cache kept, or recomputed at each change. *Conventional*: all of
the response is C's. The number is KL(sampling distribution || C + g), exact over the vocabulary at every sampled token
and averaged over tokens, in nats; a token's distribution is the one that it was drawn from. L is the run's longest
response (44 tokens) and g up to 16: the paper has 2,048 and 32. Held-out prompts, three seeds of sampling and training
each; the interval is over seeds.

The paper gives no number; it finds in-flight responses closer to C + g than conventional ones at all three stages, and
the stale cache only slightly worse than the recomputed one.
"""

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from absl import app

from configs.run_folder import RunFolder
from configs.tasks import catalog
from launch.startup.prepare_run import open_prepared
from learner.data.prompt_stream import load_prompts
from learner.data.tokenizer import load_tokenizer
from learner.model.architecture import Architecture
from tests.bench.harness import result, runs
from tests.bench.harness.estimates import mean
from tests.bench.harness.figure import COLORS, pyplot

LAGS = (1, 2, 4, 8, 16)
STAGES = (0, 22, 44)
"""First checkpoints, of 60 updates; the paper's are 0, 100 and 190 of 222."""
NUM_UPDATES = STAGES[-1] + LAGS[-1]
NUM_RESPONSES = 512
KINDS = ("conventional", "in flight, KV kept", "in flight, KV recomputed")
KEPT, RECOMPUTED = KINDS[1:]
Policy = Any
"""A transformers model."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Responses of R requests, up to L tokens each."""

    tokens: torch.Tensor
    """Prompts, padded on the left, and responses: int64 (R, P + L)."""
    is_token: torch.Tensor
    """Bool (R, P + L): False for padding, and after a response's end."""
    logprobs: torch.Tensor
    """Distribution that each response token was drawn from: float32 (R, L, V)."""


def lag_at(token: int, *, lag: int, num_tokens: int) -> int:
    """Returns the number of updates before a response's token, the first being 0 (section 5.1, equation 8)."""
    every = num_tokens / lag
    return max(0, min(lag, int(token / every) - 1))


@torch.inference_mode()
def sample(
    policy_at: Callable[[int], Policy],
    prompts: Sequence[np.ndarray],
    *,
    num_tokens: int,
    ends: Sequence[int],
    keeps_cache: bool,
    seed: int,
) -> Sampled:
    """Samples a response of each prompt; `policy_at` returns the policy that draws a token."""
    width = max(map(len, prompts))
    tokens = torch.tensor(np.stack([np.pad(p, (width - len(p), 0)) for p in prompts]), dtype=torch.int64)
    is_token = torch.tensor(np.stack([np.arange(width) >= width - len(p) for p in prompts]))
    source = torch.Generator().manual_seed(seed)
    has_ended = torch.zeros(len(prompts), dtype=torch.bool)
    drawn_from, cache, last = [], None, None
    for index in range(num_tokens):
        policy = policy_at(index)
        if policy is not last and not keeps_cache:
            cache = None
        last = policy
        positions = (is_token.cumsum(1) - 1).clamp(min=0)
        new = slice(None) if cache is None else slice(-1, None)
        out = policy(
            tokens[:, new],
            attention_mask=is_token.long(),
            position_ids=positions[:, new],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        logprobs = out.logits[:, -1].log_softmax(-1)
        drawn_from.append(logprobs)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=source)
        tokens = torch.cat([tokens, drawn], 1)
        is_token = torch.cat([is_token, ~has_ended[:, None]], 1)
        has_ended |= torch.isin(drawn[:, 0], torch.tensor(ends))
    return Sampled(tokens, is_token, torch.stack(drawn_from, 1))


@torch.inference_mode()
def divergence(sampled: Sampled, policy: Policy) -> float:
    """Returns KL(what was sampled from || policy) in nats, the mean over the sampled tokens."""
    positions = (sampled.is_token.cumsum(1) - 1).clamp(min=0)
    out = policy(sampled.tokens, attention_mask=sampled.is_token.long(), position_ids=positions)
    num_tokens = sampled.logprobs.shape[1]
    other = out.logits[:, -num_tokens - 1 : -1].log_softmax(-1)
    each = (sampled.logprobs.exp() * (sampled.logprobs - other)).sum(-1)
    return float(each[sampled.is_token[:, -num_tokens:]].mean())


def checkpoints_of(run: RunFolder, first: int, root: pathlib.Path, start: pathlib.Path) -> list[Policy]:
    """Returns the policies of the checkpoints first to first + g."""
    policies = []
    for step in range(first, first + LAGS[-1] + 1):
        folder = root / str(step)
        if step == 0:
            folder = start
        elif not folder.is_dir():
            command = [sys.executable, "-m", "launch.tools.evaluate.export", str(run.path), str(step), str(folder)]
            subprocess.run(command, check=True)
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        policies.append(policy.eval())
    return policies


def play(seed: int, root: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each stage, lag and kind."""
    if not (root / "train.jsonl").is_file():
        catalog.write_files("code", root, seed=0)
    overrides: Mapping[str, object] = {
        "run.seed": seed,
        "run.num_updates": NUM_UPDATES,
        "prompts.path": root / "train.jsonl",
        "rounds.groups_per_round": 8,
        "checkpoint.every_n_steps": 1,
        "checkpoint.keep": 2 * NUM_UPDATES,
    }
    runs.run_job("tiny_code", overrides, root / f"run-{seed}")
    prepared = open_prepared(str(root / f"run-{seed}"))
    config = prepared.config
    vocab_size = Architecture.from_hf(prepared.model_folder).vocab_size
    tokenizer = load_tokenizer(prepared.model_folder, vocab_size=vocab_size, template=config.prompts.template_settings)
    _, held_out, _ = load_prompts(config, tokenizer)
    prompts = [held_out[i % len(held_out)].prompt_tokens for i in range(NUM_RESPONSES)]
    num_tokens, ends = config.sampling.max_response_tokens, tokenizer.stop_token_ids
    rows = []
    for first in STAGES:
        policies = checkpoints_of(RunFolder(prepared.folder), first, root / f"policies-{seed}", prepared.model_folder)
        for lag in LAGS:
            behaviors: Mapping[str, Callable[[int], Policy]] = {
                KINDS[0]: lambda _, policies=policies: policies[0],
                **dict.fromkeys(
                    KINDS[1:],
                    lambda i, lag=lag, policies=policies: policies[lag_at(i, lag=lag, num_tokens=num_tokens)],
                ),
            }
            for kind, policy_at in behaviors.items():
                sampled = sample(
                    policy_at, prompts, num_tokens=num_tokens, ends=ends, keeps_cache=kind != RECOMPUTED, seed=seed
                )
                kl = divergence(sampled, policies[lag])
                rows.append({"stage": first, "lag": lag, "kind": kind, "seed": seed, "kl": kl})
                print(rows[-1], flush=True)
    return rows


def values_of(rows: Sequence[Mapping[str, Any]], lag: int) -> dict[str, Any]:
    """Returns by how much conventional responses diverge more at the largest lag, and stale caches than fresh ones."""

    def kl(stage: int, kind: str, seed: int) -> float:
        key = {"stage": stage, "kind": kind, "seed": seed, "lag": lag}
        return next(row["kl"] for row in rows if key.items() <= row.items())

    seeds = sorted({row["seed"] for row in rows})
    values: dict[str, Any] = {}
    for stage in sorted({row["stage"] for row in rows}):
        for name, (of, to) in {
            "conventional_over_in_flight": (KINDS[0], KEPT),
            "kept_over_recomputed": (KEPT, RECOMPUTED),
        }.items():
            values[f"{name}_{stage}"] = mean([kl(stage, of, s) / kl(stage, to, s) for s in seeds])
    ratios = {k: v.value for k, v in values.items()}
    values["least_conventional_over_in_flight"] = min(v for k, v in ratios.items() if k.startswith("conventional"))
    values["most_kept_over_recomputed"] = max(v for k, v in ratios.items() if k.startswith("kept"))
    return values


def draw(file: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a PNG with a panel for each stage: KL by lag, a line for each kind, the mean over seeds."""
    plt = pyplot()
    stages = sorted({row["stage"] for row in rows})
    fig, axes = plt.subplots(1, len(stages), figsize=(3.4 * len(stages), 3.2), layout="constrained", sharey=True)
    for axis, stage in zip(np.atleast_1d(axes), stages, strict=True):
        for color, kind in zip(COLORS, KINDS, strict=False):
            of = [row for row in rows if row["stage"] == stage and row["kind"] == kind]
            lags = sorted({row["lag"] for row in of})
            means = [np.mean([row["kl"] for row in of if row["lag"] == lag]) for lag in lags]
            axis.plot(lags, means, color=color, marker="o", markersize=3, linewidth=1.4, label=kind)
        axis.set(title=f"from checkpoint {stage}", xlabel="largest lag g, updates", xscale="log", yscale="log")
        axis.set_xticks(LAGS, [str(lag) for lag in LAGS])
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("KL to checkpoint C + g, nats per token")
    np.atleast_1d(axes)[0].legend(frameon=False, fontsize=8)
    fig.savefig(file, dpi=130)
    plt.close(fig)


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    seeds = [0] if result.SMALL.value else list(map(int, runs.SEEDS.value))
    rows = [row for seed in seeds for row in play(seed, runs.folder_of("mixed-policy"))]
    folder = result.results_folder()
    if folder is not None:
        draw(folder / "mixed_policy.png", rows)
    result.finish(
        "mixed_policy",
        __doc__,
        values=values_of(rows, LAGS[-1]),
        aims={
            "least_conventional_over_in_flight": result.at_least(1.0, "PipelineRL, Figure 7: closer at all stages"),
        },
        rows=rows,
        columns={
            "from": "{stage}",
            "g": "{lag}",
            "behavior": "{kind}",
            "seed": "{seed}",
            "KL, nats per token": "{kl:.2e}",
        },
        beside="nothing; training before it by the main job",
        figure=folder is not None,
    )


if __name__ == "__main__":
    app.run(main)
