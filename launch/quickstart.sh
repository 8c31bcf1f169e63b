#!/usr/bin/env bash
# Sets up, then trains a tiny model on this machine: real learner, real vLLM actor, a few minutes.
#
#   bash launch/quickstart.sh [--config.NAME=VALUE ...]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
unset PYTHONPATH PYTHONHOME

bash launch/setup.sh

.venv/bin/python -m launch.local --config=configs/tiny.py "$@"

cat <<'HINTS'

To look closer (the summary names the run folder):
  report     open its report.html in a browser: curves, the timeline of rounds, samples, faults, config
  samples    .venv/bin/python -m launch.samples --run_dir=runs/NAME --grep=TEXT
  curves     .venv/bin/tensorboard --logdir runs
  timeline   open the run's trace.json at https://ui.perfetto.dev
  again      remove the run folder, or name another: --config.run.name=NAME
HINTS
