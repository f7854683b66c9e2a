# shellcheck shell=bash
# Step 6 on several hosts. Beside what step 4 started stand COMBINED_WORKERS, each for both phases,
# with a proxy of their own on the first host. They are a cluster of their own, so by another prefix
# in etcd. On each host this step starts its own; on the first one it measures, and ends them all.

COMBINED_PREFIX=/neuron-di-combined

bench_hosts() {
    local index indexes
    indexes=$(hosts_here)
    COMBINED_URL=http://127.0.0.1:$COMBINED_PORT
    need_slots
    if is_first_host; then
        use_key
        need_ready
        start_combined_proxy
    fi
    for index in $indexes; do
        say
        say "on ${ADDRESSES[$index]}:"
        start_workers_of "$index" "${COMBINED_WORKERS[@]}"
    done
    for index in $indexes; do
        until_workers_up "$index" "${COMBINED_WORKERS[@]}"
    done
    if ! is_first_host; then
        say "next: this step on ${ADDRESSES[0]}, which measures them and ends them"
        return
    fi
    say
    measure
    end_combined
}

# Step 7's workers may have the same slots.
need_slots() {
    local line name
    [ -z "$IS_DRY" ] || return 0
    for line in "${MORE_WORKERS[@]}"; do
        name=${line%% *}
        ! pid_of "$name" >/dev/null || missing "$name of step 7 has NeuronCores of this step" \
            "on the first host: $(by_hand drain "$name")"
    done
}

# It tells which other hosts' workers lack; where one does, nothing has been started.
start_combined_proxy() {
    local line name host
    ((${#COMBINED_WORKERS[@]} > 0)) || return 0
    pid_of combined-proxy >/dev/null || need_port 127.0.0.1 "$COMBINED_PORT" COMBINED_PORT
    start combined-proxy neuron-di proxy --port "$COMBINED_PORT" \
        --etcd "${ADDRESSES[0]}:$ETCD_PORT" --etcd-prefix "$COMBINED_PREFIX"
    until_up combined-proxy has_said_ready combined-proxy
    for line in "${COMBINED_WORKERS[@]}"; do
        read -r name _ host _ <<<"$line"
        is_here "${ADDRESSES[$host]}" || until_succeeds 5 has_joined "$name" "$COMBINED_URL" || {
            stop combined-proxy
            missing "$name does not run yet" "first this step on ${ADDRESSES[$host]}"
        }
    done
}

measure() {
    local line name
    if ((${#COMBINED_WORKERS[@]} == 0)); then
        say "COMBINED_WORKERS is empty: what step 4 started is measured alone, beside nothing"
        run_bench --url "$URL" --name "$(roles)"
        return
    fi
    for line in "${COMBINED_WORKERS[@]}"; do
        name=${line%% *}
        [ -n "$IS_DRY" ] || until_succeeds 120 has_joined "$name" "$COMBINED_URL" ||
            missing "the proxy does not list $name" "neuron-di status --url $COMBINED_URL says why"
    done
    say "$(roles), $((${#WORKERS[@]} * TP)) NeuronCores, beside ${#COMBINED_WORKERS[@]} combined" \
        "workers, $((${#COMBINED_WORKERS[@]} * TP)) NeuronCores, on the same hosts"
    run_bench --url "$URL" --name "$(roles)" --url "$COMBINED_URL" --name combined
}

# As in 1P1D.
roles() {
    local line role prefill=0 decode=0
    for line in "${WORKERS[@]}"; do
        read -r _ role _ <<<"$line"
        case $role in
            prefill) prefill=$((prefill + 1)) ;;
            decode) decode=$((decode + 1)) ;;
        esac
    done
    echo "${prefill}P${decode}D"
}

# By their proxy, since they are on all hosts. There they end by themselves.
end_combined() {
    local line name
    for line in "${COMBINED_WORKERS[@]}"; do
        run neuron-di drain "${line%% *}" --url "$COMBINED_URL" --force
    done
    ((${#COMBINED_WORKERS[@]} == 0)) || stop combined-proxy
    [ -n "$IS_DRY" ] || stop_combined_workers
}

# Those of this machine. Step 6 may have been broken off, and step 7 needs their slots.
stop_combined_workers() {
    local line name
    for line in "${COMBINED_WORKERS[@]}"; do
        name=${line%% *}
        [ ! -e "$STATE/$name.pid" ] || stop "$name"
    done
}
