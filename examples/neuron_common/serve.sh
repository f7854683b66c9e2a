# shellcheck shell=bash
# Step 4. One host: `serve`, which starts a proxy and its workers. Several: etcd and a proxy on the
# first one, and on each host the workers that WORKERS in settings.sh puts there.

serve() {
    need_neuron_di
    alone
    if has_several_hosts; then serve_hosts; else serve_one_host; fi
}

serve_one_host() {
    need_cores $((2 * TP)) "a smaller TP"
    shape "$TP"
    pid_of serve >/dev/null || need_port 127.0.0.1 "$PROXY_PORT" PROXY_PORT
    start serve env NEURON_RT_VISIBLE_CORES="$(cores 0 $((2 * TP)))" "${WORKER_ENVIRONMENT[@]}" \
        neuron-di serve "$MODEL" --model-name "$MODEL_NAME" "${SHAPE[@]}" --port "$PROXY_PORT"
    until_up serve is_ready
    tell "serves $MODEL_NAME at $URL/v1; 5-request.sh asks it"
}

serve_hosts() {
    local index indexes
    indexes=$(hosts_here)
    for index in $indexes; do
        say
        say "on ${ADDRESSES[$index]}:"
        if ((index == 0)); then
            start_etcd
            make_key
            start_proxy
        fi
        start_workers_of "$index" "${WORKERS[@]}"
    done
    for index in $indexes; do
        until_workers_up "$index" "${WORKERS[@]}"
    done
    tell
    tell "when this step has run on every host, $URL/v1 serves $MODEL_NAME; 5-request.sh asks it"
}

start_etcd() {
    local client=http://${ADDRESSES[0]}:$ETCD_PORT peer=http://127.0.0.1:$ETCD_PEER_PORT
    need etcd "sudo apt-get install etcd-server, then: sudo systemctl disable --now etcd"
    pid_of etcd >/dev/null || {
        need_port "${ADDRESSES[0]}" "$ETCD_PORT" ETCD_PORT
        need_port 127.0.0.1 "$ETCD_PEER_PORT" ETCD_PEER_PORT
    }
    start etcd etcd --name neuron-di --data-dir "$STATE/tutorial-etcd" \
        --listen-client-urls "$client" --advertise-client-urls "$client" \
        --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" \
        --initial-cluster "neuron-di=$peer" \
        --auto-compaction-mode periodic --auto-compaction-retention 1h
    until_up etcd curl --silent --fail --max-time 5 "$client/health"
}

# One key for all that these steps ask, made once. It is never printed, and never an argument.
make_key() {
    local key authorization
    key=$(word "$STATE/key") authorization=$(word "$STATE/authorization")
    say "\$ umask 077"
    show_to ">$key" neuron-di key create --operator "$STATE/keys.toml" tutorial
    say "\$ echo \"Authorization: Bearer \$(<$key)\" >$authorization"
    [ -z "$IS_DRY" ] && [ ! -s "$STATE/key" ] || return 0
    (
        umask 077
        neuron-di key create --operator "$STATE/keys.toml" tutorial >"$STATE/key.new"
        echo "Authorization: Bearer $(<"$STATE/key.new")" >"$STATE/authorization"
        mv "$STATE/key.new" "$STATE/key"
    )
}

start_proxy() {
    pid_of proxy >/dev/null || need_port "${ADDRESSES[0]}" "$PROXY_PORT" PROXY_PORT
    start proxy neuron-di proxy --host "${ADDRESSES[0]}" --port "$PROXY_PORT" \
        --api-keys "$STATE/keys.toml" --etcd "${ADDRESSES[0]}:$ETCD_PORT"
    until_up proxy has_said_ready proxy
}

# start_workers_of HOST WORKER…: those of these workers that belong to this host. A WORKER is a line
# of settings.sh: name, role, number of its host, slot.
start_workers_of() {
    local index=$1 line name role host slot
    for line in "${@:2}"; do
        read -r name role host slot <<<"$line"
        ((host == index)) || continue
        need_cores $(((slot + 1) * TP)) "another slot, or a smaller TP"
        start_worker "$name" "$role" "${ADDRESSES[$host]}" "$slot"
    done
}

start_worker() {
    local name=$1 role=$2 address=$3 slot=$4 offset simulated=() apart=()
    shape "$TP"
    [ -z "$IS_SIMULATED" ] || simulated=(NRT_SIM_HOST="$address")
    [ "$role" != both ] || apart=(--etcd-prefix "$COMBINED_PREFIX") # step 6
    pid_of "$name" >/dev/null || for offset in 0 1 2 3; do
        need_port "$address" "$(worker_port "$slot" "$offset")" WORKER_PORT
    done
    start "$name" env NEURON_RT_VISIBLE_CORES="$(cores_of_slot "$slot")" \
        "${WORKER_ENVIRONMENT[@]}" "${simulated[@]}" \
        neuron-di worker "$MODEL" --model-name "$MODEL_NAME" "${SHAPE[@]}" \
        --role "$role" --worker-id "$name" --host "$address" --insecure \
        --port "$(worker_port "$slot" 0)" --signal-port "$(worker_port "$slot" 1)" \
        --transfer-port "$(worker_port "$slot" 2)" \
        --nrt-control-port "$(worker_port "$slot" 3)" \
        --etcd "${ADDRESSES[0]}:$ETCD_PORT" "${apart[@]}"
}

until_workers_up() {
    local index=$1 line name host
    for line in "${@:2}"; do
        read -r name _ host _ <<<"$line"
        ((host != index)) || until_up "$name" has_said_ready "$name"
    done
}
