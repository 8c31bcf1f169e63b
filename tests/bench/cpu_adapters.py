"""What an adapter costs an engine on a CPU: SmolLM2 without one, with one multiplied our way, and vLLM's own.

    python -m tests.bench.cpu_adapters [--rounds=3] [--smollm2=FOLDER] [--small]

Seconds to read 64 prompts of 33 tokens and write a token for each, and to write 25, in engines that start one after
another, each kind as often as there are rounds; the quickest of each kind counts. All requests are under one adapter of
rank 16 on all matrices of the layers. vLLM's backend copies an adapter's matrices for each token of a step; ours
multiplies by them once. The aims were chosen after a first look (1.2 and a quarter).
"""

import collections
import json
import pathlib
import tempfile
import time
from typing import Any

from absl import app, flags
from safetensors.numpy import save_file

from actor.vllm.lora_serving import engine_arguments, peft_settings
from actor.weights.model_folder import read_model_folder
from bridge.param_names import adapter_table
from configs.schema import Config
from configs.sections import LoraConfig, PublishConfig
from tests.bench.harness import result
from tests.bench.harness.parts import last_line_of
from tests.bench.harness.runs import MODEL
from tests.integration.support.models import random_adapters

ROUNDS = flags.DEFINE_integer("rounds", 3, "Engines of each kind.", lower_bound=1)
KINDS = {"none": "no adapter", "ours": "an adapter, `actor.vllm.lora_cpu`", "vllm": "an adapter, vLLM's backend"}
ONE = flags.DEFINE_enum("one", None, list(KINDS), "Measures one kind in this process.")
PROMPT_TOKENS, RESPONSE_TOKENS = 33, 25
CONFIG = Config(preset="rolloutpipe", lora=LoraConfig(rank=16), publish=PublishConfig(lora="adapter"))


def main(argv: list[str]) -> None:
    """Measures all kinds, writes the results, prints the JSON line."""
    del argv
    num_prompts = 4 if result.SMALL.value else 64
    if ONE.value:
        print(json.dumps(measure(ONE.value, num_prompts)), flush=True)
        return
    seen: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for _ in range(ROUNDS.value):
        for kind in KINDS:
            seen[kind].append(run(kind))
            print(kind, {k: v for k, v in seen[kind][-1].items() if k != "tokens"}, flush=True)
    first = {kind: min(one["first_s"] for one in runs) for kind, runs in seen.items()}
    whole = {kind: min(one["all_s"] for one in runs) for kind, runs in seen.items()}
    same = [a == b for a, b in zip(seen["ours"][0]["tokens"], seen["vllm"][0]["tokens"], strict=True)]
    values = {
        **{f"first_s_{kind}": s for kind, s in first.items()},
        **{f"all_s_{kind}": s for kind, s in whole.items()},
        "all_of_none": whole["ours"] / whole["none"],
        "all_of_vllm": whole["ours"] / whole["vllm"],
        "same_responses": sum(same) / len(same),
    }
    rows = [
        {
            "name": KINDS[kind],
            "first_s": first[kind],
            "first_of_none": first[kind] / first["none"],
            "all_s": whole[kind],
            "all_of_none": whole[kind] / whole["none"],
        }
        for kind in KINDS
    ]
    result.finish(
        "cpu_adapters",
        __doc__,
        values=values,
        aims={
            "all_of_none": result.at_most(1.5, "ours, after a first look"),
            "all_of_vllm": result.at_most(0.5, "ours, after a first look"),
        },
        rows=rows,
        columns={
            "engine": "{name}",
            "prompts and first tokens, s": "{first_s:.2f}",
            "first, times none": "{first_of_none:.2f}",
            "all tokens, s": "{all_s:.2f}",
            "all, times none": "{all_of_none:.2f}",
        },
        beside="an engine at a time",
        runs={kind: [{**one, "tokens": None} for one in of_kind] for kind, of_kind in seen.items()},
    )


def run(kind: str) -> dict[str, Any]:
    """One engine, in a process of its own; only with ours it has our plugin."""
    small = ["--small"] if result.SMALL.value else []
    environment = {
        "VLLM_PLUGINS": "sluice" if kind == "ours" else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return last_line_of(
        "tests.bench.cpu_adapters", f"--one={kind}", f"--smollm2={MODEL.value}", *small, env=environment
    )


def measure(kind: str, num_prompts: int) -> dict[str, Any]:
    """Seconds of one engine in this process, and the tokens it wrote."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    if kind == "ours":
        import actor.vllm.worker  # noqa: F401  # as vLLM does, where the project is installed

    with tempfile.TemporaryDirectory() as folder:
        write_adapter(pathlib.Path(MODEL.value), pathlib.Path(folder))
        engine = LLM(
            MODEL.value,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=128,
            enable_prefix_caching=False,
            **({} if kind == "none" else engine_arguments(CONFIG)),
        )
        if ("GroupedCpuLora" in current_platform.get_punica_wrapper()) != (kind == "ours"):
            raise RuntimeError(f"{kind} was not what was measured")
        request = None if kind == "none" else LoRARequest("one", 1, folder)
        prompts = [
            TokensPrompt(prompt_token_ids=[(7 * i + j) % 5000 + 10 for j in range(PROMPT_TOKENS)])
            for i in range(num_prompts)
        ]

        def answer(count: int, new_tokens: int) -> tuple[float, list[list[int]]]:
            params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
            start = time.perf_counter()
            said = engine.generate(prompts[:count], params, lora_request=request, use_tqdm=False)
            return time.perf_counter() - start, [list(one.outputs[0].token_ids) for one in said]

        answer(2, 2)
        first_s, _ = answer(num_prompts, 1)
        all_s, tokens = answer(num_prompts, RESPONSE_TOKENS)
        return {"first_s": first_s, "all_s": all_s, "tokens": tokens}


def write_adapter(model: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes a random adapter of all matrices of the layers, in PEFT's format."""
    tensors = read_model_folder(model, dtype="float32").tensors
    table = adapter_table(tensors, modules=CONFIG.lora.modules, rank=CONFIG.lora.rank)
    small = {name: 0.05 * x for name, x in random_adapters(table, seed=0).items()}
    save_file(small, folder / "adapter_model.safetensors")
    settings = {**peft_settings(CONFIG.lora), "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    app.run(main)
