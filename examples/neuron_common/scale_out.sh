# shellcheck shell=bash
# Step 7. One more decode worker, while requests run. Nothing is restarted.

scale_out() {
    need_neuron_di
    alone
    if has_several_hosts; then scale_out_hosts; else scale_out_one_host; fi
}

# On the host that has the new worker's slot, which need not be the first one.
scale_out_hosts() {
    local index indexes
    indexes=$(hosts_here)
    [ -n "$IS_DRY" ] || stop_combined_workers
    for index in $indexes; do
        say "on ${ADDRESSES[$index]}:"
        start_workers_of "$index" "${MORE_WORKERS[@]}"
        until_workers_up "$index" "${MORE_WORKERS[@]}"
    done
    is_first_host || return 0
    use_key
    show_joined
}

# `serve` keeps a registry of its own, and says its address.
scale_out_one_host() {
    local registry
    need_ready
    need_cores $((3 * TP)) "start again with a smaller TP, or with more hosts: README.md, two hosts"
    shape "$TP"
    capture registry tcp://127.0.0.1:40001 \
        sed -nE 's/.*registry=(tcp:\S+).*/\1/p' "$STATE/serve.log"
    registry=${registry##*$'\n'} # the latest, should the proxy have been started again
    start decode-1 env NEURON_RT_VISIBLE_CORES="$(cores_of_slot 2)" "${WORKER_ENVIRONMENT[@]}" \
        neuron-di worker "$MODEL" --model-name "$MODEL_NAME" "${SHAPE[@]}" \
        --role decode --worker-id decode-1 --registry "$registry"
    until_up decode-1 has_said_ready decode-1
    show_joined
}

# The proxy gives it requests once a small one went through each of its pairs. It is ready before it
# is connected to the prefill worker.
show_joined() {
    [ -n "$IS_DRY" ] || until_succeeds 120 takes_kv decode-1 ||
        missing "decode-1 takes no KV from a prefill worker" "$(by_hand status) says why"
    run neuron-di status --url "$URL"
}

# takes_kv WORKER
takes_kv() { neuron-di status --url "$URL" | grep "^$1 takes KV from " >/dev/null; }

# has_joined WORKER URL
has_joined() { neuron-di status --url "$2" | grep "^$1 .* ready " >/dev/null; }
