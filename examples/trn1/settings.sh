# shellcheck shell=bash disable=SC2034  # used by the files of neuron_common
# What differs from instance to instance; ../neuron_common/defaults.sh and ports.sh have the rest.
# A variable of the environment goes before: TP=8 ./4-serve.sh

# The instance. NeuronCores are numbered over the whole host; two Trainium devices share an EFA.
: "${INSTANCE_TYPE:=trn1.32xlarge}"
: "${NUM_CORES:=32}"
: "${NUM_EFA:=8}"
DEGREES=(1 2 8 16 32) # so many NeuronCores the runtime joins

# The model, and what it is compiled for. TP must divide its attention heads and its MLP's columns.
: "${MODEL:=Qwen/Qwen3-8B}"
: "${MODEL_NAME:=qwen3-8b}" # as clients say it
: "${TP:=16}"               # NeuronCores of a worker: prefill on 0-15, decode on 16-31

# Several hosts. Name, role, number of its host, slot of NeuronCores (0: 0-15, 1: 16-31).
WORKERS=("prefill-0 prefill 0 0" "decode-0 decode 1 0")
MORE_WORKERS=("decode-1 decode 1 1") # step 7
COMBINED_WORKERS=("combined-0 both 0 1" "combined-1 both 1 1") # step 6, while it runs
WORKER_ENVIRONMENT=(
    NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1
    NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT="$BOOTSTRAP_PORT"
    FI_EFA_ENABLE_SHM_TRANSFER=0
    FI_EFA_USE_DEVICE_RDMA=1 # as AWS has it on Trn1: off for what uses libfabric as before 1.18
)

# Step 1.
: "${SDK:=2.28}" # the last one whose NxD Inference is for Trn1
: "${GROUP_NAME:=neuron-di-trn1}" # security group, placement group, instances
