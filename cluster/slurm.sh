#!/usr/bin/env bash
#SBATCH --job-name=raycl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=4
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@180
#SBATCH --time=24:00:00
#SBATCH --output=raycl-%j.log
#SBATCH --open-mode=append
#
# One Slurm job = one Ray cluster = one command, for example, from the repository root after `make venv`:
#
#     sbatch cluster/slurm.sh --config jobs/configs/demo.yaml launch.workers=8 output.dir=/shared/runs output.name=my-run
#
# --exclusive, because `ray symmetric-run` ends with `ray stop`, which stops every Ray of this user on the node.
# --signal: 180 s before the time limit Slurm sends SIGTERM to this script (B), which forwards it to the driver. The
# driver's workers write a checkpoint within launch.grace_s (110 s), the driver exits with 75, and this script requeues
# the job. `scancel --batch --signal=TERM JOB` does the same at any time; `scancel JOB` ends the job for good.
# output.exists=resume: a requeued job resumes its run, which is named slurm-JOB unless output.name is set.
set -euo pipefail

readonly RESUME=75 # EX_TEMPFAIL: the driver stopped after a checkpoint and can be resumed
srun=
stopping=
signals=0
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT

# SIGTERM must not go through srun: Slurm would send it to all processes of the step, and Ray's would end at once. The
# driver runs on this node, the first of the job, and has written its process id.
forward() {
    signals=$((signals + 1))
    [[ -z $stopping ]] || return 0 # once: the next one would end the driver before its checkpoint is complete
    if [[ -s $state/driver ]]; then
        stopping=driver
        kill -TERM "$(<"$state/driver")" 2>/dev/null || true
    else
        stopping=start # Ray is still starting, and there is nothing to save
        [[ -z $srun ]] || kill -TERM "$srun" 2>/dev/null || true
    fi
}
trap forward TERM

cd "${SLURM_SUBMIT_DIR:-.}"
. .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${head%%$'\n'*}
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=180
export RAYCL_RUN_NAME=${RAYCL_RUN_NAME:-slurm-$SLURM_JOB_ID}

status=$RESUME
if [[ -z $stopping ]]; then
    # srun hands the environment, and so the token, to every node
    # shellcheck disable=SC2016 # expanded by the inner shell
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" \
        -- bash -c 'echo "$$" >"$0" && exec "$@"' "$state/driver" \
        python jobs/train_stream.py launch.address=auto output.exists=resume "$@" &
    srun=$!
    [[ $stopping != start ]] || kill -TERM "$srun" 2>/dev/null || true
    # A signal ends `wait` early, so wait again until srun has really ended.
    while true; do
        before=$signals status=0
        wait "$srun" || status=$?
        ((before != signals)) || break
    done
fi

# A driver that gets SIGTERM while it imports its modules has no handler yet: 143, or 241 where Python passes it on.
if [[ $stopping == start || (-n $stopping && ($status == 143 || $status == 241)) ]]; then
    status=$RESUME
fi
if ((status == RESUME)); then
    case $(scontrol show job "$SLURM_JOB_ID" || true) in
        *JobState=CANCELLED* | *JobState=COMPLETING*) ;; # by scancel, or Slurm requeues it itself
        *) scontrol requeue "$SLURM_JOB_ID" || echo "the job is not requeued: submit the same command again" >&2 ;;
    esac
fi
exit "$status"
