# shellcheck shell=bash
# What is compiled, and which NeuronCores a worker gets: TP neighbouring ones, its slot. Slot 0 has
# the cores from 0 on, slot 1 those from TP on.

# Sets SHAPE: the flags that compile, serve and worker must have in common.
shape() {
    SHAPE=(--device neuron --tp "$1" --context-tokens "$CONTEXT_TOKENS"
        --decode-batch "$DECODE_BATCH" --dtype "$DTYPE")
}

# cores FIRST COUNT: as NEURON_RT_VISIBLE_CORES spells them.
cores() {
    if (($2 == 1)); then echo "$1"; else echo "$1-$(($1 + $2 - 1))"; fi
}

cores_of_slot() { cores $(($1 * TP)) "$TP"; }

need_cores() {
    (($1 <= NUM_CORES)) || missing \
        "$1 NeuronCores are needed, and $INSTANCE_TYPE has $NUM_CORES" "$2"
}

compile_model() {
    [[ -z ${DEGREES:-} || " ${DEGREES[*]} " == *" $1 "* ]] || missing \
        "$1 NeuronCores cannot be joined on $INSTANCE_TYPE" "one of ${DEGREES[*]} for a worker"
    [ -n "$IS_SIMULATED" ] ||
        need neuronx-cc "./install.sh, or source the SDK's environment, which has the compiler"
    shape "$1"
    run neuron-di compile "$MODEL" "${SHAPE[@]}"
}
