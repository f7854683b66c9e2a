# shellcheck shell=bash
# Step 2: what is wrong with this machine, before it costs an hour.

check() {
    local index indexes
    need_neuron_di
    if ! has_several_hosts; then
        doctor --port "$PROXY_PORT"
        return
    fi
    indexes=$(hosts_here)
    for index in $indexes; do
        doctor_of_host "$index" "${ADDRESSES[$index]}"
    done
}

# doctor_of_host HOST ADDRESS: at the ports that step 4 will use there
doctor_of_host() {
    local address=$2 listen
    listen=$address:$(worker_port 0 2),$address:$(worker_port 0 3)
    (($1 != 0)) || listen+=,$address:$PROXY_PORT,$address:$ETCD_PORT
    doctor --host "$address" --port "$(worker_port 0 0)" --signal-port "$(worker_port 0 1)" \
        --listen "$listen"
}

# A simulation has no driver, device or adapter to be found.
doctor() {
    if [ -z "$IS_SIMULATED" ]; then
        run neuron-di doctor --device neuron "$@"
    else
        run neuron-di doctor --device neuron "$@" ||
            say "simulated: what it misses of neuron and efa above is not here, and nothing to mend"
    fi
}
