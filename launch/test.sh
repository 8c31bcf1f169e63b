#!/usr/bin/env bash
# Linters, types, import rules and tests. Every step runs; the summary and the
# exit status give the result.
#
#   bash launch/test.sh            sets up, then runs all tests: first without an
#                                  engine, then with engines
#   bash launch/test.sh --fast     daily loop: no set-up if .venv works, no engine,
#                                  no test marked heavy, types of changed files
#                                  only; passes further arguments to pytest, as in
#                                  --fast -x tests/learner
#   bash launch/test.sh --ci       all tests; also fails if a test is skipped for a
#                                  reason that is not in .ci/skips.txt
#   bash launch/test.sh --nightly  sets up, then runs tests marked nightly and
#                                  property tests with many examples (hours)
#   bash launch/test.sh -m unit    sets up, then runs pytest with your arguments
#
# The linters run concurrently with the first tests. Tests without an engine use
# two processes more than cores, because many wait for subprocesses. Up to four
# engines run concurrently, each on separate cores, because on shared cores they
# start several times slower. With a GPU, one engine runs at a time, because it
# uses the whole GPU.
#
# For tests without an engine XLA optimizes less, because compilation takes longer
# than the compiled code. With engines, with your own arguments (-m unit) and with
# a GPU, XLA optimizes as in a run. The processes share the compiled code. --fast
# keeps it in .cache/jax; the other modes begin with an empty folder, so results
# do not depend on earlier runs.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root" || exit 1
export PYTHONNOUSERSITE=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYTHONPATH PYTHONHOME
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules, which the first one compiles for all

bin=.venv/bin
on_all_cores=(-n "$(($(nproc) + 2))" --maxprocesses=8 --dist=worksteal)
# In-process tests never wait, and each pytest process needs seconds for collection.
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
folder="$(mktemp -d)" # output of the linters, output of all steps, summary
colour=()
if [ -t 1 ]; then colour=(--color=yes); fi
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$folder"' EXIT

is_fast=false is_nightly=false
case "${1:-}" in
  --fast) is_fast=true && shift ;;
  --nightly) is_nightly=true && shift ;;
  --ci) skips=(--allowed-skips=.ci/skips.txt) && shift ;;
esac
# Paths in the arguments replace the default folders of --fast.
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then fast_folders=(); fi
done
# Reports arguments that pytest rejects, before any other step if an environment exists, else after the set-up.
check_arguments() {
  local said
  "$bin/python" -m pytest --markers "$@" >"$folder/usage" 2>&1
  [ $? = 4 ] || return 0
  said="$(sed -n 's/.*error: //p' "$folder/usage" | head -n 1)"
  if [ -n "$said" ]; then
    echo "error: $said; bash launch/test.sh --help lists the arguments" >&2
  else # for example a conftest.py that cannot be imported
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
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share a GPU
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
  # The whole tree takes minutes of CPU time, so --fast checks only files of the last commit and the working tree.
  if $is_fast && git rev-parse -q --verify HEAD~1 >/dev/null 2>&1; then
    mapfile -t files < <(changed_files)
    if [ "${#files[@]}" -gt 0 ]; then step "pyright, changed files" "$bin/pyright" "${files[@]}"; fi
  else
    step "pyright" "$bin/pyright"
  fi
}

lint >"$folder/lint" 2>&1 &
if $is_fast; then
  tests "unit tests without heavy ones" quickly_compiled "${a_process_per_core[@]}" -m "unit and not heavy" \
    --list-costly=0.5 "$@" "${fast_folders[@]}"
elif $is_nightly; then
  # As in a run: XLA optimizes, and one test at a time uses all cores.
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
grep -E $'^(\e\\[[0-9;]*m)*(FAILED|ERROR)' "$folder/said" | head -n 100 # failures from pytest's output
cat "$folder/summary"
! grep -q ^FAILED "$folder/summary"
