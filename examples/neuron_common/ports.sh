# shellcheck shell=bash
# Every port that something listens on. A worker in slot 1 has those of slot 0 and 10 more.
# What `serve` starts listens on loopback only, at ports that the kernel chooses.

: "${PROXY_PORT:=8000}"      # clients, metrics, orders
: "${PAIR_PORT:=8001}"       # step 6: a pair of workers …
: "${COMBINED_PORT:=8002}"   # … beside one that does both; several hosts: the proxy of those
: "${ETCD_PORT:=2379}"       # first host: all workers and proxies
: "${ETCD_PEER_PORT:=2380}"  # first host, loopback: other members, of which there is none
: "${WORKER_PORT:=9000}"     # +0 its HTTP, +1 signals, +2 KV by tcp, +3 agreement on KV by nrt
: "${BOOTSTRAP_PORT:=45645}" # Neuron's send and receive find each other; the same on all hosts

# worker_port SLOT OFFSET
worker_port() { echo $((WORKER_PORT + 10 * $1 + $2)); }

# Nobody else has it. Asked before something is started there.
need_port() {
    [ -n "$IS_DRY" ] || is_here_free "$1" "$2" ||
        missing "port $2 of $1 is taken" "end who has it (ss -ltnp), or set $3"
}

is_here_free() {
    python3 -c '
import socket, sys
try:
    socket.create_server((sys.argv[1], int(sys.argv[2]))).close()
except OSError:
    sys.exit(1)' "$1" "$2"
}
