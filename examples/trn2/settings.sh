# shellcheck shell=bash disable=SC2034  # used by the files of neuron_common
# What differs from instance to instance; ../neuron_common/defaults.sh and ports.sh have the rest.
# A variable of the environment goes before: TP=16 ./4-serve.sh

# The instance: 128 NeuronCores, of which the runtime makes 64 logical ones. All numbers here are of
# logical cores, over the whole host; each Trainium2 device has an EFA of its own.
: "${INSTANCE_TYPE:=trn2.48xlarge}"
: "${NUM_CORES:=64}"
: "${NUM_EFA:=16}"
DEGREES=() # how many NeuronCores the runtime joins: any number, as far as is known

# The model, and what it is compiled for. TP must divide its attention heads and its MLP's columns.
: "${MODEL:=Qwen/Qwen3-32B}"
: "${MODEL_NAME:=qwen3-32b}" # as clients say it
: "${TP:=32}"                # logical cores of a worker: prefill on 0-31, decode on 32-63

# Several hosts. Name, role, number of its host, slot of logical cores (0: 0-31, 1: 32-63).
WORKERS=("prefill-0 prefill 0 0" "decode-0 decode 1 0")
MORE_WORKERS=("decode-1 decode 1 1") # step 7
COMBINED_WORKERS=("combined-0 both 0 1" "combined-1 both 1 1") # step 6, while it runs
WORKER_ENVIRONMENT=(
    NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1
    NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT="$BOOTSTRAP_PORT"
    FI_EFA_ENABLE_SHM_TRANSFER=0
)

# Step 1.
: "${SDK:=2.31}" # the last one that has NxD Inference
: "${GROUP_NAME:=neuron-di-trn2}" # security group, placement group, instances
: "${DISK_GIB:=1000}" # system, packages, weights, what was compiled
