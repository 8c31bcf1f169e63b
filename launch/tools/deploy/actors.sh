# One actor of the job's array: one that dies is started again, alone, under a new name (a fenced name stays fenced).
set -uo pipefail
here="$SLURM_SUBMIT_DIR"
# shellcheck source=settings.sh
. "$here/settings.sh"
# shellcheck source=step.sh
. "$here/step.sh"

actor="actor-$SLURM_ARRAY_TASK_ID"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || actor="$actor-q$SLURM_RESTART_COUNT"
# A new folder of this user's alone: another user of the node may have made one of any name that is known before.
work_dir="$(mktemp -d "${TMPDIR:-/tmp}/sluice-$SLURM_JOB_ID-XXXXXXXX")" || exit 1
trap 'rm -rf "$work_dir"' EXIT
listen 23  # SIGURG, see watched.sh

ends_with_its_run() {  # whether an actor ended well because the run is finished; the learner's job says so soon
  for ((look = 0; look < 3; look++)); do
    [ ! -e "$finished" ] || return 0
    sleep "$pause_s"
  done
  return 1
}

restarts=0 name="$actor"
while [ -z "$leaving" ] && [ ! -e "$finished" ]; do
  export name work_dir
  actor_command
  run_step --ntasks=1 bash "$here/watched.sh" "${actor_bounds[@]}" -- "${command[@]}"
  case $code in
    0)
      [ -z "$leaving" ] || break
      ends_with_its_run || { was_passed_by && queue_again "the actor was told to leave"; }
      break
      ;;
    2) echo "$name can't be started like this, see above" >&2; exit 2 ;;
    75) continue ;;  # with other limits of its engine, under its name
  esac
  restarts=$((restarts + 1))
  name="$actor-r$restarts"
  echo "the actor ended with code $code; it starts again as $name" >&2
  sleep "$pause_s"
done
[ "$leaving" != time ] || [ -e "$finished" ] || queue_again "time is up"
