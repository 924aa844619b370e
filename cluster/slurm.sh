#!/usr/bin/env bash
#SBATCH --job-name=raycl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=4
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --time=24:00:00
#SBATCH --output=raycl-%j.log
#
# One Slurm job = one Ray cluster = one command, for example, from the repository root after `make venv`:
#
#     sbatch cluster/slurm.sh --config jobs/configs/demo.yaml launch.workers=8 output.dir=/shared/runs output.name=my-run
#
# --exclusive, because `ray symmetric-run` ends with `ray stop`, which stops every Ray of this user on the node.
# --requeue with output.exists=resume below: after a preemption the same job goes on where it stopped.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=180

# srun hands the environment, and so the token, to every node
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" -- \
    python jobs/train_stream.py launch.address=auto output.exists=resume "$@"
