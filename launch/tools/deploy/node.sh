# Machine with learner and engines: launch.local supervises both. Before the time limit it receives a stop request, and
# the job is requeued and resumes from the last checkpoint. The job is also requeued if only launch.local was signaled.
set -uo pipefail
here="$SLURM_SUBMIT_DIR"
# shellcheck source=settings.sh
. "$here/settings.sh"
# shellcheck source=step.sh
. "$here/step.sh"

listen TERM
node_command
run_step --ntasks=1 "${command[@]}"
[ "$leaving" != time ] || [ "$code" = 0 ] || queue_again "time is up"
[ "$code" != 130 ] || ! was_passed_by || queue_again "stop requested for launch.local"
exit "$code"
