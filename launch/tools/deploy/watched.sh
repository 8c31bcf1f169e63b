# Runs one process under watch: `watched.sh [--codes=HAS:GIVES,...] [--note=HAS:FILE] BOUNDS... -- PYTHON ARGUMENTS...`.
# It ends with the process's code, or with what `codes` gives for it; after the code of `note` the file is there.
# One that hangs is killed with all it started (python -m launch.supervision.kubernetes_probe looks every so often), and counts as killed.
# SIGTERM and SIGURG are handed on as SIGTERM: the process saves, or gives back what it has, and ends. SIGURG is for jobs:
# where Slurm signals all processes of a step, the others pass over it, and none is told twice.
set -uo pipefail

bounds=() codes="" note=""
while [ "$1" != -- ]; do
  case $1 in
    --codes=*) codes="${1#--codes=}" ;;
    --note=*) note="${1#--note=}" ;;
    *) bounds+=("$1") ;;
  esac
  shift
done
shift

folder="$(mktemp -d "/dev/shm/sluice-$UID-XXXXXX")" || exit 1
export SLUICE_LIVENESS_FILE="$folder/liveness"
setsid "$@" & process=$!  # a process group of its own

watch() {
  while sleep "${SLUICE_PROBE_EVERY_S:-20}" &>/dev/null; do
    "$1" -m launch.supervision.kubernetes_probe --liveness_file="$SLUICE_LIVENESS_FILE" "${bounds[@]}"
    [ $? = 3 ] || continue
    echo "the process hangs and is killed: ${*:2}" >&2
    kill -KILL -- "-$process"
    return
  done
}
watch "$@" & watcher=$!

# shellcheck disable=SC2329  # by the trap
end() { kill -KILL "$watcher" "-$process" 2>/dev/null; rm -rf "$folder"; }
trap end EXIT
trap 'kill -TERM "$process" 2>/dev/null' TERM INT URG

code=0
wait "$process" || code=$?
while kill -0 "$process" 2>/dev/null; do  # a signal ended the wait, not the process
  code=0
  wait "$process" || code=$?
done
[ "${note%%:*}" != "$code" ] || : > "${note#*:}"
for pair in ${codes//,/ }; do
  [ "${pair%:*}" != "$code" ] || exit "${pair#*:}"
done
exit "$code"
