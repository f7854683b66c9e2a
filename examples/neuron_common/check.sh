# shellcheck shell=bash
# Step 2: what is wrong with this machine, before it costs an hour.

check() {
    local index indexes
    need_neuron_di
    if ! has_several_hosts; then
        doctor --port "$PROXY_PORT" --listen "127.0.0.1:$PAIR_PORT,127.0.0.1:$COMBINED_PORT"
        return
    fi
    indexes=$(hosts_here)
    for index in $indexes; do
        doctor_of_host "$index" "${ADDRESSES[$index]}"
    done
}

# doctor_of_host HOST ADDRESS: at the ports that steps 4, 6 and 7 will use there
doctor_of_host() {
    local address=$2 line host slot offset place listen=''
    if (($1 == 0)); then
        listen=$address:$PROXY_PORT,$address:$ETCD_PORT
        listen+=,127.0.0.1:$ETCD_PEER_PORT,127.0.0.1:$COMBINED_PORT
    fi
    for line in "${WORKERS[@]}" "${MORE_WORKERS[@]}" "${COMBINED_WORKERS[@]}"; do
        read -r _ _ host slot <<<"$line"
        ((host == $1)) || continue
        for offset in 0 1 2 3; do
            place=$address:$(worker_port "$slot" "$offset")
            [[ ,$listen, == *,$place,* ]] || listen+=${listen:+,}$place # of steps 6 and 7
        done
    done
    doctor --host "$address" --port 0 --listen "$listen"
}

# With what the workers of the other steps find in their environment.
doctor() { run env "${WORKER_ENVIRONMENT[@]}" neuron-di doctor --device neuron "$@"; }
