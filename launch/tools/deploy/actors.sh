# Actor of one array task. A dead actor is restarted under a new name, because a fenced name stays fenced.
set -uo pipefail
here="$SLURM_SUBMIT_DIR"
# shellcheck source=settings.sh
. "$here/settings.sh"
# shellcheck source=step.sh
. "$here/step.sh"

actor="actor-$SLURM_ARRAY_TASK_ID"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || actor="$actor-q$SLURM_RESTART_COUNT"
# Private folder with a random name: another user of the node could create a folder of a predictable name first.
work_dir="$(mktemp -d "${TMPDIR:-/tmp}/sluice-$SLURM_JOB_ID-XXXXXXXX")" || exit 1
trap 'rm -rf "$work_dir"' EXIT
listen 23  # SIGURG; see watched.sh

ends_with_its_run() {  # succeeds if the run is finished; the learner's job may create the file a little later
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
      ends_with_its_run || { was_passed_by && queue_again "stop requested for the actor"; }
      break
      ;;
    2) echo "$name: invalid input; see the error above" >&2; exit 2 ;;
    75) continue ;;  # restart with new engine limits, under the same name
  esac
  restarts=$((restarts + 1))
  name="$actor-r$restarts"
  echo "actor exited with code $code; restarting as $name" >&2
  sleep "$pause_s"
done
[ "$leaving" != time ] || [ -e "$finished" ] || queue_again "time is up"
