# A machine with learner and engines: launch.local watches both. Before the time is up it is told to end, and the job is
# queued again, to go on from the last checkpoint; so it is where launch.local alone was told to.
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
[ "$code" != 130 ] || ! was_passed_by || queue_again "launch.local was told to stop"
exit "$code"
