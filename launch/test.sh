#!/usr/bin/env bash
# Sets up, then linters, types, import rules and tests. Every step runs; the summary and the exit status tell.
#
#   bash launch/test.sh               linters, then pytest -m 'unit or integration'
#   bash launch/test.sh -m unit       linters, then pytest with your arguments (add --run-slow for the slow tests)
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root" || exit 1
export PYTHONNOUSERSITE=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYTHONPATH PYTHONHOME

bash launch/setup.sh || exit 1

[ $# -gt 0 ] || set -- -m "unit or integration"
bin=.venv/bin
failed=0
summary=()

step() {
  local name="$1" start=$SECONDS status=0
  shift
  printf '\n== %s\n' "$name"
  "$@" </dev/null || status=$?
  if [ "$status" -eq 0 ]; then
    summary+=("ok      $name ($((SECONDS - start))s)")
  else
    summary+=("FAILED  $name ($((SECONDS - start))s, exit $status)")
    failed=1
  fi
}

step "ruff check" "$bin/ruff" check .
step "ruff format" "$bin/ruff" format --check .
step "pyright" "$bin/pyright"
step "import rules" "$bin/lint-imports"
step "pytest" "$bin/python" -m pytest --durations=10 "$@"

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
