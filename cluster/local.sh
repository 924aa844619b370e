#!/usr/bin/env bash
# A cluster of several Ray nodes on this one machine, for the length of one command:
#
#     cluster/local.sh python jobs/train_stream.py launch.workers=2
#     NODES=3 CPUS=2 cluster/local.sh ray job submit --working-dir . -- python jobs/train_stream.py launch.workers=6
#
# It shows what differs from a laptop run (workers on other nodes, submitted jobs, killed nodes) without a second
# machine. The nodes end with the command, and nothing else on this machine is touched: never `ray stop`, which
# stops every Ray of this user.
set -euo pipefail

[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
NODES=${NODES:-2}
CPUS=${CPUS:-1}

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}

folder=$(mktemp -d /tmp/rXXXX)  # short: Ray keeps UNIX sockets below it
nodes=()
stop() {
    trap - EXIT
    [ ${#nodes[@]} -eq 0 ] || kill "${nodes[@]}" 2>/dev/null || true
    wait
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() {
    ray start --block --num-cpus="$CPUS" --temp-dir="$folder" --disable-usage-stats "$@" >>"$folder/start.log" 2>&1 &
    nodes+=($!)
}

read -r gcs dashboard < <(python -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(opened.getsockname()[1] for opened in sockets))')
address=127.0.0.1:$gcs
start --head --node-ip-address=127.0.0.1 --port="$gcs" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard"
until ray health-check --address "$address" >/dev/null 2>&1; do
    kill -0 "${nodes[0]}" 2>/dev/null || { cat "$folder/start.log" >&2; exit 1; }
    sleep 0.5
done
for _ in $(seq 2 "$NODES"); do
    start --address="$address" --node-ip-address=127.0.0.1
done

export RAY_ADDRESS=$address
timeout --foreground 120 python - "$NODES" <<'PY' || { cat "$folder/start.log" >&2; exit 1; }
import sys, time
import ray

ray.init(logging_level="error")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(0.3)
PY
echo "local cluster: $NODES nodes of $CPUS CPUs at $address, dashboard http://127.0.0.1:$dashboard"
RAY_API_SERVER_ADDRESS=http://127.0.0.1:$dashboard "$@"
