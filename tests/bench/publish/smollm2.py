"""One AdamW step of a real pretrained model, SmolLM2-135M-Instruct: `python -m tests.bench.publish.smollm2 INTO`.

The step runs in a process of its own: torch stays out of the bench.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
from absl import app, logging

REPOSITORY = pathlib.Path(__file__).parents[3]
MODEL = REPOSITORY / "models" / "smollm2"
LEARNING_RATES = ("1e-6", "1e-5")
NUM_WARMUP_STEPS = 4
"""Steps before the one that is measured, at its own rate: AdamW's first step moves every weight by the whole rate."""
BATCH, TOKENS = 2, 128
_STEP_S = 1800


class UnavailableError(RuntimeError):
    """The model can't be had here."""


def steps(into: pathlib.Path) -> dict[str, tuple[pathlib.Path, pathlib.Path]]:
    """Returns, by learning rate, files of the bfloat16 parameters before and after one step at it.

    Raises UnavailableError with what was said last if the model could not be made, or its steps failed.
    """
    for module, *arguments in (("launch.tools.get_model", "smollm2", f"--out={MODEL}"), (__name__, str(into))):
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=_STEP_S)
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise UnavailableError(f"{module} failed: {said}")
    return {rate: (into / f"before-{rate}.npz", into / f"after-{rate}.npz") for rate in LEARNING_RATES}


def main(arguments: list[str]) -> None:
    """AdamW on next-token loss, float32 parameters; what is served is rounded to bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    into = pathlib.Path(arguments[1])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
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
