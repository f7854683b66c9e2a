# shellcheck shell=bash
# --simulate: this machine stands for hosts with NeuronCores. A libnrt in C takes the runtime's
# place, packages of our own that of NxD Inference (both in tests/), a model of 3.5 million
# parameters that of a large one. So it shows that the steps work, and nothing of speed.

# Sourced before settings.sh, whose values give way to these.
: "${MODEL:=$ROOT/examples/models/tiny-tales}"
: "${MODEL_NAME:=tiny-tales}"
: "${TP:=2}"
: "${CONTEXT_TOKENS:=256}"
: "${DECODE_BATCH:=4}"
: "${DTYPE:=float32}" # as on a CPU, so that answers are the same
: "${READY_TIMEOUT_S:=120}"
: "${STOP_TIMEOUT_S:=30}"
: "${BENCH_LOAD:=--requests 4 --warmup 1 --slices 2 --input-tokens 32 --output-tokens 8}"
: "${PORT_BASE:=21000}"
need_number PORT_BASE 1 65000 # it is counted with here
: "${PROXY_PORT:=$PORT_BASE}"
: "${PAIR_PORT:=$((PORT_BASE + 1))}"
: "${COMBINED_PORT:=$((PORT_BASE + 2))}"
: "${ETCD_PORT:=$((PORT_BASE + 3))}"
: "${ETCD_PEER_PORT:=$((PORT_BASE + 4))}"
: "${BOOTSTRAP_PORT:=$((PORT_BASE + 5))}"
: "${WORKER_PORT:=$((PORT_BASE + 10))}"

# What every process must find in its environment. NRT_SIM_ROOT is what the simulated hosts share:
# who has which core. Sockets lie in there, so its path has to be short.
enter_simulation() {
    local library
    case $HOSTS in
        '' | 127.*) ;;
        *) wrong_option "with --simulate, hosts are this machine: 127.0.0.1,127.0.0.2" ;;
    esac
    say "simulated: $INSTANCE_TYPE, by the libnrt in tests/nrt_sim; nothing here is a Neuron device"
    export NRT_SIM_INSTANCE=$INSTANCE_TYPE
    export NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT=$BOOTSTRAP_PORT
    export NEURON_DI_THREADS=1 OMP_NUM_THREADS=1
    export NEURON_DI_NEURON_ARTIFACTS=${NEURON_DI_NEURON_ARTIFACTS:-$ROOT/build/neuron_artifacts}
    [ -z "$IS_DRY" ] || return 0
    need_neuron_di
    [ -d "$ROOT/tests/nrt_sim" ] || missing "the simulator is not here" "take the whole repository"
    library=$(PYTHONPATH=$ROOT/tests python3 -m nrt_sim.build) ||
        missing "the simulator of libnrt cannot be built" "sudo apt-get install gcc"
    export NEURON_DI_LIBNRT=$library
    export PYTHONPATH=$ROOT/tests/neuron_stand_in${PYTHONPATH:+:$PYTHONPATH}
    NRT_SIM_ROOT=$(cat "$STATE/simulated_hosts" 2>/dev/null) && [ -d "$NRT_SIM_ROOT" ] || {
        NRT_SIM_ROOT=$(mktemp -d /tmp/nrt-XXXXXX)
        # Of a step that starts nothing; the first one shows only, and has IS_DRY by then.
        trap '[ -n "$(started)" ] || IS_DRY="" leave_simulation' EXIT
    }
    export NRT_SIM_ROOT
    echo "$NRT_SIM_ROOT" >"$STATE/simulated_hosts"
}

# Once everything has ended nobody needs it.
leave_simulation() {
    [ -n "$IS_DRY" ] || rm -rf "$NRT_SIM_ROOT" "$STATE/simulated_hosts"
}
