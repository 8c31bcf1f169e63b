#!/usr/bin/env bash
# Linters, types, import rules and tests. Every step runs; the summary and the exit status tell.
#
#   bash launch/test.sh               sets up, then everything: the tests without an engine, then those with one
#   bash launch/test.sh --fast        the daily loop: no set-up where .venv works, no engine, no test marked heavy, types
#                                     of changed files; what follows goes to pytest, as in --fast -x tests/learner
#   bash launch/test.sh --ci          everything, and a test skipped for a reason that is not in .ci/skips.txt fails
#   bash launch/test.sh --nightly     sets up, then the tests marked nightly, which the others leave out, and properties with
#                                     many examples (hours)
#   bash launch/test.sh -m unit       sets up, then pytest with your arguments
#
# The linters run beside the first tests, and tests without an engine in a process a core and two more: many wait for
# processes of their own. Engines run up to four at a time, each with cores of its own (on the same cores they take
# several times as long to start); one at a time where there is a GPU, which an engine takes whole.
#
# For the tests without an engine XLA optimises less: compiling takes longer than what is compiled. It optimises as in a
# run beside engines, with arguments of your own (-m unit) and where there is a GPU. What it compiled is shared by the
# processes of a run. --fast keeps it in .cache/jax for the next one; the others begin with an empty folder: nothing they
# show rests on an earlier run.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root" || exit 1
export PYTHONNOUSERSITE=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYTHONPATH PYTHONHOME
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules: the first one compiles them for all

bin=.venv/bin
on_all_cores=(-n "$(($(nproc) + 2))" --maxprocesses=8 --dist=worksteal)
# Tests in process wait for nothing, and each pytest process spends seconds on collecting.
a_process_per_core=(-n "$(nproc)" --maxprocesses=8 --dist=worksteal)
fast_folders=(tests/actor tests/bridge tests/configs tests/docs tests/launch tests/learner tests/test_*.py)
engine_folders=(tests/integration tests/launch/tools/profile_machine)
skips=()
engines=(-n "$(nproc)" --maxprocesses=4 --dist=loadscope --engines-apart)
quickly_compiled=(env JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_use_fusion_emitters=false")
as_in_a_run=(env)
if compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
  engines=()
  quickly_compiled=("${as_in_a_run[@]}")
fi
case "${1:-}" in -h | --help) exec sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' launch/test.sh ;; esac
folder="$(mktemp -d)" # the linters' output, what all steps said, the summary
colour=()
if [ -t 1 ]; then colour=(--color=yes); fi
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$folder"' EXIT

is_fast=false is_nightly=false
case "${1:-}" in
  --fast) is_fast=true && shift ;;
  --nightly) is_nightly=true && shift ;;
  --ci) skips=(--allowed-skips=.ci/skips.txt) && shift ;;
esac
# Folders of your own take the place of those that --fast names.
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then fast_folders=(); fi
done
# What pytest doesn't know is said in a line before anything else is done, or after the set-up where there was none.
check_arguments() {
  local said
  "$bin/python" -m pytest --markers "$@" >"$folder/usage" 2>&1
  [ $? = 4 ] || return 0
  said="$(sed -n 's/.*error: //p' "$folder/usage" | head -n 1)"
  if [ -n "$said" ]; then
    echo "error: $said; bash launch/test.sh --help shows what there is" >&2
  else # as where a conftest.py can't be imported
    cat "$folder/usage" >&2
  fi
  exit 2
}
is_checked=false
if "$bin/python" -c "import pytest, xdist" 2>/dev/null; then
  check_arguments "$@"
  is_checked=true
fi
if ! $is_fast || ! $is_checked; then bash launch/setup.sh +dev || exit 1; fi
if ! $is_checked; then check_arguments "$@"; fi

export JAX_COMPILATION_CACHE_DIR="$folder/jax" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export XLA_PYTHON_CLIENT_PREALLOCATE=false # where there is a GPU, several processes share it
if $is_fast; then export JAX_COMPILATION_CACHE_DIR="$root/.cache/jax"; fi

step() {
  local name="$1" start=$SECONDS status=0
  shift
  printf '\n== %s\n' "$name"
  "$@" </dev/null 2>&1 | tee -a "$folder/said" || status=$?
  if [ "$status" -eq 0 ]; then
    echo "ok      $name ($((SECONDS - start))s)" >>"$folder/summary"
  else
    echo "FAILED  $name ($((SECONDS - start))s, exit $status)" >>"$folder/summary"
  fi
}

# tests NAME COMPILED ARGUMENT...: pytest, with an environment for XLA.
tests() {
  local name="$1" compiled="$2[@]"
  shift 2
  step "$name" "${!compiled}" "$bin/python" -m pytest --durations=10 "${colour[@]}" "$@"
}

changed_files() {
  git diff --name-only --diff-filter=d HEAD~1 -- '*.py'
  git ls-files --others --exclude-standard -- '*.py'
}

lint() {
  local files
  step "ruff check" "$bin/ruff" check .
  step "ruff format" "$bin/ruff" format --check .
  step "import rules" "$bin/lint-imports"
  # The whole tree takes minutes of CPU: --fast looks at what the last commit and the working tree change.
  if $is_fast && git rev-parse -q --verify HEAD~1 >/dev/null 2>&1; then
    mapfile -t files < <(changed_files)
    if [ "${#files[@]}" -gt 0 ]; then step "pyright, changed files" "$bin/pyright" "${files[@]}"; fi
  else
    step "pyright" "$bin/pyright"
  fi
}

lint >"$folder/lint" 2>&1 &
if $is_fast; then
  tests "unit tests, but for the heavy ones" quickly_compiled "${a_process_per_core[@]}" -m "unit and not heavy" \
    --list-costly=0.5 "$@" "${fast_folders[@]}"
elif $is_nightly; then
  # As in a run: XLA optimises, and one test at a time has all cores.
  tests "nightly tests" as_in_a_run -m "nightly or hypothesis" --run-nightly "$@"
elif [ $# -gt 0 ]; then
  tests "pytest" as_in_a_run "$@"
else
  tests "tests without an engine" quickly_compiled "${on_all_cores[@]}" "${skips[@]}" \
    -m "(unit or integration) and not engine" --ignore=tests/integration/engine
fi
wait
cat "$folder/lint"
if ! $is_fast && ! $is_nightly && [ $# -eq 0 ]; then
  tests "tests with an engine" as_in_a_run "${engines[@]}" "${skips[@]}" -m engine "${engine_folders[@]}"
fi

printf '\n== summary\n'
grep -E $'^(\e\\[[0-9;]*m)*(FAILED|ERROR)' "$folder/said" | head -n 100 # what pytest said far above
cat "$folder/summary"
! grep -q ^FAILED "$folder/summary"
