"""Every model family against its two references: transformers, and vLLM after each publish.

    python -m tests.bench.families [--model=FOLDER] [--only=FAMILY,...] [--noengines] [--notransformers]

Tiny random models with odd shapes (`tests/learner/model/tiny.py`): logits of dense rows and of a packed row, and the
gradient of summed log-probabilities, against transformers in float32. Then one engine a family and kind of head
(`tests/integration/support/engines.py`): four publishes of weights that all change, and after each the
log-probabilities of what was sampled, the engine's against the learner's. `--model` adds a Hugging Face folder with
real weights to both.

Logits are the largest absolute differences, gradients the largest relative to a tensor's largest entry (or 1), engine
the largest |dlogprob| in nats over all publishes. What the other flags leave out is kept from the stored results.
"""

import dataclasses
import pathlib
import tempfile
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import app, flags

from bridge import weight_types
from bridge.param_names import flatten
from learner.model.hf_load import load
from tests.bench.harness import result
from tests.integration.engine.test_parity import NUM_PUBLISHES, published_errors
from tests.integration.support import models
from tests.integration.support.engines import EngineKind, start_bench
from tests.learner.model.test_decoder import SEQUENCES, by_hf_name, gradient, loaded, logits_of, random_tokens
from tests.learner.model.tiny import MODELS, pack, row
from tests.param_tensors import iter_tensors

MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder with real weights, measured too.")
ONLY = flags.DEFINE_list("only", None, "Families by model_type; the others' numbers are kept. 'none' is no family.")
TRANSFORMERS = flags.DEFINE_bool("transformers", True, "Compare the tiny models with transformers.")
ENGINES = flags.DEFINE_bool("engines", True, "Start engines; without them only transformers is compared with.")
PARTS = ("transformers", "engines", "real")
REAL_NOISE = 1e-4
"""Added to every weight of a real model at each publish: it stays a language model."""
TEXTS = (
    "What is 23 + 48? Reply with the number only.",
    "def fibonacci(n):\n    return n if n < 2 else",
    "The capital of France is Paris, and the capital of Japan is",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Against:
    """Largest differences from transformers; the gradients' are relative to a tensor's largest entry, or 1."""

    dense: float
    packed: float
    gradient: float | None
    largest_logit: float


def tiny_against_transformers(name: str) -> Against:
    """Of one of the tiny models."""
    reference, config, params = loaded(name)
    tokens = random_tokens(2, 19)
    with torch.no_grad():
        want = reference(torch.from_numpy(tokens)).logits.numpy()
    packed, start = logits_of(config, params, pack(SEQUENCES, 32))[0], 0
    batch = pack(SEQUENCES, 32)
    targets, weights = np.roll(batch[0], -1, 1), np.zeros((1, 32), np.float32)
    reference.zero_grad()
    total, errors = torch.zeros(()), []
    for sequence in SEQUENCES:
        end = start + len(sequence)
        weights[0, start : end - 1] = 1
        logits = reference(torch.from_numpy(sequence)[None]).logits[0]
        errors.append(np.abs(packed[start:end] - logits.detach().numpy()).max())
        logp = torch.log_softmax(logits / 0.7, -1)
        total = total + logp[:-1].gather(1, torch.from_numpy(sequence[1:, None])).sum()
        start = end
    total.backward()  # pyright: ignore[reportAttributeAccessIssue]
    grads = flatten(gradient(config, params, batch, targets, weights, remat="attention"))
    wanted = by_hf_name({key: p.grad.numpy() for key, p in reference.named_parameters()})
    got = dict(iter_tensors(config.param_names, grads))
    relative = [np.abs(got[key] - x).max() / max(1, np.abs(x).max()) for key, x in wanted.items()]
    return Against(
        dense=float(np.abs(logits_of(config, params, row(tokens)) - want).max()),
        packed=float(max(errors)),
        gradient=float(max(relative)),
        largest_logit=float(np.abs(want).max()),
    )


def real_against_transformers(folder: pathlib.Path) -> Against:
    """Of a folder's weights, in float32, on three texts: each alone, and packed in one row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config, params = load(folder, dtype=jnp.float32)
    sequences = [np.asarray(tokenizer(text).input_ids) for text in TEXTS]
    want = []
    with torch.no_grad():
        for sequence in sequences:
            want.append(model.eval()(torch.from_numpy(sequence)[None]).logits[0].numpy())
    length = sum(map(len, sequences))
    packed = logits_of(config, params, pack(sequences, length))[0]
    alone = [logits_of(config, params, row(sequence[None]))[0] for sequence in sequences]
    return Against(
        dense=float(max(np.abs(a - b).max() for a, b in zip(alone, want, strict=True))),
        packed=float(np.abs(packed - np.concatenate(want)).max()),
        gradient=None,
        largest_logit=float(max(np.abs(x).max() for x in want)),
    )


def engine_error(kind: EngineKind, *, folder: pathlib.Path | None = None) -> float:
    """The largest |dlogprob| over all publishes."""
    with tempfile.TemporaryDirectory(prefix="sluice-families-") as root:
        bench = start_bench(pathlib.Path(root), kind, folder=folder)
        try:
            worst, _ = published_errors(bench, noise=0.05 if folder is None else REAL_NOISE)
        finally:
            bench.close()
    return max(worst)


def main(argv: list[str]) -> None:
    """Measures all, writes the results, prints the JSON line."""
    del argv
    is_whole = not ONLY.value and ENGINES.value and TRANSFORMERS.value
    kept = {} if is_whole else {n: of for n, of in (result.stored("families") or {}).items() if n in PARTS}
    families = [family for family in get_args(models.Family) if not ONLY.value or family in ONLY.value]
    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS} | kept
    for name in (name for name, (family, _) in MODELS.items() if family in families and TRANSFORMERS.value):
        found["transformers"][name] = dataclasses.asdict(tiny_against_transformers(name))
        print(name, found["transformers"][name], flush=True)
    for kind in (EngineKind(family=family, tied=tied) for family in families for tied in (True, False)):
        # vLLM's Gemma 2 is always tied.
        if ENGINES.value and (kind.tied or kind.family != "gemma2"):
            name = f"{kind.family}, {'tied' if kind.tied else 'untied'}"
            found["engines"][name] = engine_error(kind)
            print(name, found["engines"][name], flush=True)
    if MODEL.value is not None:
        folder = pathlib.Path(MODEL.value)
        real = dataclasses.asdict(real_against_transformers(folder))
        error = engine_error(EngineKind(), folder=folder) if ENGINES.value else None
        found["real"][folder.name] = real | {"dlogprob": error}
        print(folder.name, found["real"][folder.name], flush=True)
    _finish(found)


def _finish(found: dict[str, dict[str, Any]]) -> None:
    tiny, engines, real = (found[part] for part in PARTS)
    rows = [{"name": name, **a} for name, a in (tiny | real).items()]
    rows += [{"name": f"engine: {name}", "dlogprob": error} for name, error in engines.items()]
    result.finish(
        "families",
        __doc__,
        values={
            "max_abs_dlogit": max((max(a["dense"], a["packed"]) for a in tiny.values()), default=None),
            "max_dgradient": max((a["gradient"] for a in tiny.values()), default=None),
            "max_abs_dlogprob": max(engines.values(), default=None),
            "real_max_abs_dlogit": max((max(a["dense"], a["packed"]) for a in real.values()), default=None),
            "real_max_abs_dlogprob": max((a["dlogprob"] for a in real.values() if a["dlogprob"]), default=None),
        },
        aims={
            **dict.fromkeys(("max_abs_dlogit", "max_dgradient", "max_abs_dlogprob"), result.at_most(1e-4)),
            "real_max_abs_dlogit": result.at_most(1e-3),
            "real_max_abs_dlogprob": result.at_most(1e-4),
        },
        rows=rows,
        columns={
            "model": "{name}",
            "logits": "{dense:.1e}",
            "packed": "{packed:.1e}",
            "gradient": "{gradient:.1e}",
            "engine": "{dlogprob:.1e}",
            "largest logit": "{largest_logit:.1f}",
        },
        beside=f"vLLM {weight_types.VLLM} on its CPU backend, {NUM_PUBLISHES} publishes",
        transformers=tiny,
        engines=engines,
        real=real,
    )


if __name__ == "__main__":
    app.run(main)
