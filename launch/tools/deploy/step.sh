# Functions of the job scripts: a background step that can be signaled and is waited for.
# shellcheck shell=bash disable=SC2034,SC2154  # the sourcing scripts use these variables and set others

step="" srun="" leaving="" untold="" code=0 steps=0
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun ignores the job's variable
finished="$here/finished"  # exists once the run is finished
stopped="$here/stopped-$SLURM_JOB_ID"  # exists once a learner process has stopped gracefully

# Slurm sends USR1 to the job script before the time limit; the job is then requeued. TERM cancels the job.
tell() {
  leaving="$1" untold="$2"
  [ -z "$srun" ] || tell_step
}

tell_step() {  # sends the signal once, also if it arrived before the step started
  [ -n "$untold" ] || return 0
  local id name told="" signal="$untold"
  untold=""
  while read -r id name; do
    [ "$name" != "$step" ] || { scancel --signal="$signal" "$id" && told=1; }
  done < <(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format="%i %j")
  [ -n "$told" ] || kill -TERM "$srun" 2>/dev/null || true  # srun forwards it and waits for its step
}

listen() {  # $1: signal that the step's processes receive
  # shellcheck disable=SC2064  # expands $1 now
  trap "tell time $1" USR1
  # shellcheck disable=SC2064
  trap "tell cancelled $1" TERM
}

run_step() {  # arguments: those of srun; sets $code
  steps=$((steps + 1))
  step="sluice-$steps"  # a name, because only Slurm knows the step's number
  srun --input=none --job-name="$step" "$@" & srun=$!
  tell_step  # a signal that arrived while it started
  code=0
  wait "$srun" || code=$?
  while kill -0 "$srun" 2>/dev/null; do  # a signal interrupted the wait; the step still runs
    code=0
    wait "$srun" || code=$?
  done
  srun=""
}

# Succeeds if the processes stopped gracefully after a signal that the job script did not receive: `scancel
# --signal=TERM JOB`, or a preemption notice. A job that Slurm ends is in state COMPLETING by then.
was_passed_by() {
  [ -z "$leaving" ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != COMPLETING ]
}

queue_again() {  # $1: reason
  echo "$1: requeued, resumes from the last checkpoint"
  rm -f "$stopped"
  exec scontrol requeue "$SLURM_JOB_ID"
}
