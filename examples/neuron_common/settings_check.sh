# shellcheck shell=bash
# A setting that cannot be meant is refused by every step, before anything is done or counted with
# it, and with what it must be.

# need_number VARIABLE MIN MAX
need_number() {
    local plain='^(0|[1-9][0-9]{0,8})$'
    if ! [[ ${!1} =~ $plain ]] || ((${!1} < $2 || ${!1} > $3)); then
        wrong_option "$1=${!1} is no number from $2 to $3"
    fi
}

# need_form VARIABLE WHAT PATTERN: WHAT says what the pattern means
need_form() {
    [[ ${!1} =~ ^($3)$ ]] || wrong_option "$1=${!1} is not $2"
}

check_settings() {
    local name
    for name in TP NUM_CORES CONTEXT_TOKENS DECODE_BATCH COUNT READY_TIMEOUT_S STOP_TIMEOUT_S; do
        need_number "$name" 1 9999999
    done
    need_number NUM_EFA 0 64
    need_number DISK_GIB 1 65536
    for name in PROXY_PORT PAIR_PORT COMBINED_PORT ETCD_PORT ETCD_PEER_PORT BOOTSTRAP_PORT; do
        need_number "$name" 0 65535
    done
    need_number WORKER_PORT 0 65000
    [ -z "${PORT_BASE:-}" ] || need_number PORT_BASE 1 65000 # what --simulate counts from
    need_form DTYPE 'auto, float32, bfloat16 or float16' 'auto|float32|bfloat16|float16'
    need_form SDK 'a release, such as 2.28' '[0-9]+\.[0-9]+'
    need_form MORE_EFA 'efa or efa-only' 'efa|efa-only'
    need_form IMAGE 'ami-…, or empty' '(ami-.+)?'
    need_form RESERVATION 'cr-…, or empty' '(cr-.+)?'
    need_form IS_CAPACITY_BLOCK 'yes, or empty' '(yes)?'
    need_form SSH_FROM 'a network, such as 203.0.113.7/32, or empty' \
        '([0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2})?'
    check_load
    check_workers
}

# Only the forms: the flags are those of `neuron-di bench --help`.
check_load() {
    local flag='' word words
    read -r -a words <<<"$BENCH_LOAD"
    for word in "${words[@]}"; do
        case $flag,$word in
            *,--*) flag=$word && continue ;;
            --requests,* | --concurrency,* | --slices,* | --warmup,* | --seed,*)
                [[ $word =~ ^[0-9]+$ ]] || wrong_load "$flag $word" "a whole number" ;;
            --rate,inf) ;;
            --rate,* | --duration-s,* | --burstiness,* | --timeout-s,*)
                [[ $word =~ ^[0-9]*\.?[0-9]+$ ]] || wrong_load "$flag $word" "a number" ;;
            ,*) wrong_load "$word" "a flag of neuron-di bench" ;;
        esac
        flag=''
    done
}

wrong_load() { wrong_option "BENCH_LOAD has $1, and that is not $2"; }

# Of the lines of settings.sh. Nobody would start a worker whose host there is not.
check_workers() {
    local line name host slot names=,
    local plain='^[A-Za-z0-9._-]+ (prefill|decode|both) (0|[1-9][0-9]?) (0|[1-9][0-9]?)$'
    for line in "${WORKERS[@]}" "${MORE_WORKERS[@]}" "${COMBINED_WORKERS[@]}"; do
        [[ $line =~ $plain ]] || wrong_option \
            "the worker '$line' is not NAME prefill|decode|both HOST SLOT, the last two numbers"
        read -r name _ host slot <<<"$line"
        [[ $names != *,$name,* ]] || wrong_option "the worker $name is there twice"
        names+=$name,
        ((${#ADDRESSES[@]} == 0 || host < ${#ADDRESSES[@]})) || wrong_option \
            "the worker $name is on host $host, and --hosts has 0 to $((${#ADDRESSES[@]} - 1))"
    done
    check_places "${WORKERS[@]}" "${MORE_WORKERS[@]}"
    check_places "${WORKERS[@]}" "${COMBINED_WORKERS[@]}"
}

check_places() {
    local line name host slot taken=,
    for line in "$@"; do
        read -r name _ host slot <<<"$line"
        [[ $taken != *,$host:$slot,* ]] ||
            wrong_option "the worker $name has a slot of host $host that another one has: $slot"
        taken+=$host:$slot,
    done
}
