# Learner process of one host; srun starts this script on each host.
set -uo pipefail
here="$1" coordinator="$2"
index="$SLURM_PROCID"
export coordinator index
# shellcheck source=settings.sh
. "$here/settings.sh"
learner_command
# srun exits with the largest code of its tasks, and tasks that it kills exit with 128 or more. So codes that a restart
# cannot fix (2, 5) map to larger ones. A host that saved and stopped (3) must not make srun kill the others, so it maps
# to 0 and creates a file from which the job script knows that the run is not finished.
exec bash "$here/watched.sh" --codes=3:0,2:252,5:255 --note="3:$here/stopped-$SLURM_JOB_ID" \
  "${learner_bounds[@]}" -- "${command[@]}"
