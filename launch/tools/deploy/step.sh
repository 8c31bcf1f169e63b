# What the scripts of jobs share: a step in the background that is told to end, and waited for.
# shellcheck shell=bash disable=SC2034,SC2154  # the scripts that read it use these, and set others

step="" srun="" leaving="" untold="" code=0 steps=0
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not read the job's
finished="$here/finished"  # there once the run is
stopped="$here/stopped-$SLURM_JOB_ID"  # there once a process of the learner has stopped in order

# Slurm sends USR1 to a job's script before its time is up; the job is then queued again. TERM is somebody's who ends it.
tell() {
  leaving="$1" untold="$2"
  [ -z "$srun" ] || tell_step
}

tell_step() {  # once, whether the signal came before the step or while it ran
  [ -n "$untold" ] || return 0
  local id name told="" signal="$untold"
  untold=""
  while read -r id name; do
    [ "$name" != "$step" ] || { scancel --signal="$signal" "$id" && told=1; }
  done < <(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format="%i %j")
  [ -n "$told" ] || kill -TERM "$srun" 2>/dev/null || true  # it waits for its step
}

listen() {  # by which signal its processes are told
  # shellcheck disable=SC2064  # the signal is known now
  trap "tell time $1" USR1
  # shellcheck disable=SC2064
  trap "tell cancelled $1" TERM
}

run_step() {  # srun's arguments; its code is in $code
  steps=$((steps + 1))
  step="sluice-$steps"  # its number is known to Slurm alone
  srun --input=none --job-name="$step" "$@" & srun=$!
  tell_step  # what came while it was started
  code=0
  wait "$srun" || code=$?
  while kill -0 "$srun" 2>/dev/null; do  # a signal ended the wait, not the step
    code=0
    wait "$srun" || code=$?
  done
  srun=""
}

# Whether its processes stopped in order by a signal that passed the job's script by: `scancel --signal=TERM JOB`, or
# the notice of a preemption. A job that Slurm ends is completing by then.
was_passed_by() {
  [ -z "$leaving" ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != COMPLETING ]
}

queue_again() {  # and why
  echo "$1: queued again, to go on where it was"
  rm -f "$stopped"
  exec scontrol requeue "$SLURM_JOB_ID"
}
