# shellcheck shell=bash
# Step 6. Workers for one phase each beside workers that do both: on as many cores of the same
# hosts, at one time, in turns.

bench() {
    need_neuron_di
    alone
    if has_several_hosts; then bench_hosts; else bench_one_host; fi
}

# The pair has half of TP for each worker, so that both servers together have the cores of step 4's.
# That one is stopped meanwhile, and started again, also where this step was broken off in between
# and is repeated: STATE/serve_again says so.
bench_one_host() {
    need_cores $((2 * TP)) "a smaller TP"
    ((TP % 2 == 0)) || missing "TP=$TP cannot be halved" "an even TP for this step"
    compile_model $((TP / 2))
    # A run of this step that was broken off may have left these.
    [ -n "$IS_DRY" ] || { stop pair && stop combined; }
    need_port 127.0.0.1 "$PAIR_PORT" PAIR_PORT
    need_port 127.0.0.1 "$COMBINED_PORT" COMBINED_PORT
    if [ -z "$IS_DRY" ] && pid_of serve >/dev/null; then touch "$STATE/serve_again"; fi
    [ -n "$IS_DRY" ] || stop decode-1 # what step 7 added needs the server
    stop serve
    start_benched pair 0 $((TP / 2)) "$PAIR_PORT"
    start_benched combined "$TP" "$TP" "$COMBINED_PORT" --combined
    until_up pair answers "$PAIR_PORT"
    until_up combined answers "$COMBINED_PORT"
    run_bench --url "http://127.0.0.1:$PAIR_PORT" --name 1P1D \
        --url "http://127.0.0.1:$COMBINED_PORT" --name combined
    stop pair
    stop combined
    [ ! -e "$STATE/serve_again" ] && [ -z "$IS_DRY" ] || serve_one_host
    [ -n "$IS_DRY" ] || rm -f "$STATE/serve_again"
}

# start_benched NAME FIRST_CORE TP PORT FLAG…: on TP cores from FIRST_CORE on
start_benched() {
    local name=$1 first=$2 tp=$3 port=$4
    shape "$tp"
    start "$name" env NEURON_RT_VISIBLE_CORES="$(cores "$first" "$TP")" \
        "${WORKER_ENVIRONMENT[@]}" \
        neuron-di serve "$MODEL" --model-name "$MODEL_NAME" "${SHAPE[@]}" --port "$port" "${@:5}"
}

answers() { curl --silent --fail --max-time 5 "http://127.0.0.1:$1/ready"; }

run_bench() {
    # shellcheck disable=SC2086  # several words
    run neuron-di bench "$@" $BENCH_LOAD --json "$STATE/bench.json"
}
