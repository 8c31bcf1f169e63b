# The learner's job. All hosts train, or none: where one ends, srun ends the others, and all start again from the last
# checkpoint, in this job while its nodes are well. Before the time is up the learner is told to save, and the job is
# queued again; so it is where the hosts alone were told to.
set -uo pipefail
here="$SLURM_SUBMIT_DIR"
# shellcheck source=settings.sh
. "$here/settings.sh"
# shellcheck source=step.sh
. "$here/step.sh"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
coordinator="${nodes[0]}:$((20000 + SLURM_JOB_ID % 20000))"
listen 23  # SIGURG, see watched.sh
trap 'rm -f "$stopped"' EXIT
rm -f "$finished"

is_done() {  # actors that serve hear of it from the store; those that start, or are yet to, would wait for a learner
  echo "run $run is done"
  : > "$finished"
  scancel --state=PENDING --user="$USER" --name="$run-actors" || true
  scancel --batch --signal=USR1 --state=RUNNING --user="$USER" --name="$run-actors" || true
}

for ((try = 0; try <= max_restarts; try++)); do
  [ -z "$leaving" ] || break  # told in the pause
  began=$SECONDS
  rm -f "$stopped"
  run_step --kill-on-bad-exit=1 --ntasks="${#nodes[@]}" --ntasks-per-node=1 bash "$here/host.sh" "$here" "$coordinator"
  if [ "$code" = 0 ] && [ ! -e "$stopped" ]; then
    is_done
    exit 0
  fi
  [ -z "$leaving" ] || break
  if [ -e "$stopped" ]; then
    was_passed_by && queue_again "the hosts were told to stop"
    exit 1  # with the job
  fi
  case $code in
    252 | 255) break ;;  # see host.sh
  esac
  [ $((SECONDS - began)) -lt 3600 ] || try=0  # it went well for long
  echo "the learner ended with code $code; it starts again from its last checkpoint" >&2
  sleep "$pause_s"
done

[ "$leaving" != time ] || [ "$code" -ge 252 ] || queue_again "time is up"
[ "$leaving" != cancelled ] || exit "$code"
echo "the learner failed with code $code for good; its actors are ended" >&2
scancel --user="$USER" --name="$run-actors" || true
exit 1
