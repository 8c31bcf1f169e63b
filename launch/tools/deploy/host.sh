# One host of the learner; srun starts it on each.
set -uo pipefail
here="$1" coordinator="$2"
index="$SLURM_PROCID"
export coordinator index
# shellcheck source=settings.sh
. "$here/settings.sh"
learner_command
# srun ends with the largest code of its tasks, and those that it kills end with 128 and more. So what can't be mended by
# starting again (2, 5) gets a larger one. A host that has saved and stopped (3) is no reason to kill the others, so it
# leaves a file, by which the job's script knows that the run is not done.
exec bash "$here/watched.sh" --codes=3:0,2:252,5:255 --note="3:$here/stopped-$SLURM_JOB_ID" \
  "${learner_bounds[@]}" -- "${command[@]}"
