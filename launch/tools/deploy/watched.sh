# Runs and watches one process:
#   watched.sh [--codes=CODE:EXIT,...] [--note=CODE:FILE] BOUNDS... -- PYTHON ARGUMENTS...
# Exits with the process's code, or with the code that `codes` maps it to. For the code of `note` it creates the file.
# A hung process is killed with its children (python -m launch.supervision.kubernetes_probe runs periodically).
# SIGTERM and SIGURG are forwarded as SIGTERM: the process saves or releases its tickets, and exits. Jobs use SIGURG:
# Slurm signals all processes of a step, the others ignore SIGURG, and so no process receives SIGTERM twice.
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
setsid "$@" & process=$!  # in its own process group

watch() {
  while sleep "${SLUICE_PROBE_EVERY_S:-20}" &>/dev/null; do
    "$1" -m launch.supervision.kubernetes_probe --liveness_file="$SLUICE_LIVENESS_FILE" "${bounds[@]}"
    [ $? = 3 ] || continue
    echo "process hung, killed: ${*:2}" >&2
    kill -KILL -- "-$process"
    return
  done
}
watch "$@" & watcher=$!

# shellcheck disable=SC2329  # called by the trap
end() { kill -KILL "$watcher" "-$process" 2>/dev/null; rm -rf "$folder"; }
trap end EXIT
trap 'kill -TERM "$process" 2>/dev/null' TERM INT URG

code=0
wait "$process" || code=$?
while kill -0 "$process" 2>/dev/null; do  # a signal interrupted the wait; the process still runs
  code=0
  wait "$process" || code=$?
done
[ "${note%%:*}" != "$code" ] || : > "${note#*:}"
for pair in ${codes//,/ }; do
  [ "${pair%:*}" != "$code" ] || exit "${pair#*:}"
done
exit "$code"
