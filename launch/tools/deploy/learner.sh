# Learner job. If one host exits, srun kills the others, and all restart from the last checkpoint within this job.
# Before the time limit the learner receives a stop request, saves, and the job is requeued. The job is also requeued
# if only the hosts received the signal.
set -uo pipefail
here="$SLURM_SUBMIT_DIR"
# shellcheck source=settings.sh
. "$here/settings.sh"
# shellcheck source=step.sh
. "$here/step.sh"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
coordinator="${nodes[0]}:$((20000 + SLURM_JOB_ID % 20000))"
listen 23  # SIGURG; see watched.sh
trap 'rm -f "$stopped"' EXIT
rm -f "$finished"

is_done() {  # serving actors read it from the store; pending and starting actors would wait for a learner
  echo "run $run is finished"
  : > "$finished"
  scancel --state=PENDING --user="$USER" --name="$run-actors" || true
  scancel --batch --signal=USR1 --state=RUNNING --user="$USER" --name="$run-actors" || true
}

for ((try = 0; try <= max_restarts; try++)); do
  [ -z "$leaving" ] || break  # signal during the pause
  began=$SECONDS
  rm -f "$stopped"
  run_step --kill-on-bad-exit=1 --ntasks="${#nodes[@]}" --ntasks-per-node=1 bash "$here/host.sh" "$here" "$coordinator"
  if [ "$code" = 0 ] && [ ! -e "$stopped" ]; then
    is_done
    exit 0
  fi
  [ -z "$leaving" ] || break
  if [ -e "$stopped" ]; then
    was_passed_by && queue_again "stop requested for the hosts"
    exit 1  # the job is ending
  fi
  case $code in
    252 | 255) break ;;  # not restartable; see host.sh
  esac
  [ $((SECONDS - began)) -lt 3600 ] || try=0  # reset the count after an hour of work
  echo "learner exited with code $code; restarting from the last checkpoint" >&2
  sleep "$pause_s"
done

[ "$leaving" != time ] || [ "$code" -ge 252 ] || queue_again "time is up"
[ "$leaving" != cancelled ] || exit "$code"
echo "learner failed with code $code, not restarted; cancelling its actors" >&2
scancel --user="$USER" --name="$run-actors" || true
exit 1
