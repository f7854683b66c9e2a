# shellcheck shell=bash disable=SC2034  # used by the files of neuron_common
# What is particular to this tutorial. A variable of the environment goes before: TP=8 ./4-serve.sh

# The instance. NeuronCores are numbered over the whole host; two Trainium devices share an EFA.
: "${INSTANCE_TYPE:=trn1.32xlarge}"
: "${NUM_CORES:=32}"
: "${NUM_EFA:=8}"

# Of AWS's image, what has NxD Inference in it.
: "${SDK_ENVIRONMENT:=/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference}"

# The model, and what it is compiled for. TP must divide its attention heads and its MLP's columns.
: "${MODEL:=Qwen/Qwen3-8B}"
: "${MODEL_NAME:=qwen3-8b}" # as clients say it
: "${TP:=16}"               # NeuronCores of a worker: prefill on 0-15, decode on 16-31
: "${CONTEXT_TOKENS:=8192}" # prompt and answer together
: "${DECODE_BATCH:=4}"      # requests that a worker decodes together
: "${DTYPE:=bfloat16}"
: "${READY_TIMEOUT_S:=3600}" # until a worker has loaded
: "${STOP_TIMEOUT_S:=120}"   # until a process that was asked to end has drained

# Several hosts. Name, role, number of its host, slot of NeuronCores (0: 0-15, 1: 16-31).
WORKERS=("prefill-0 prefill 0 0" "decode-0 decode 1 0")
MORE_WORKERS=("decode-1 decode 1 1") # step 7
WORKER_ENVIRONMENT=(
    NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1
    NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT="$BOOTSTRAP_PORT"
    FI_EFA_ENABLE_SHM_TRANSFER=0
    FI_EFA_USE_DEVICE_RDMA=1 # as AWS has it on Trn1: off for what uses libfabric as before 1.18
)

# Step 6.
: "${BENCH_LOAD:=--requests 100 --concurrency 4 --input-tokens 1024 --output-tokens 128}"

# Step 1. REGION, SUBNET and KEY_NAME have no defaults.
: "${COUNT:=1}"        # instances
: "${SDK:=2.28}"       # the last one whose NxD Inference is for Trn1
: "${IMAGE_NAME:=Deep Learning AMI Neuron (Ubuntu 24.04)}"
: "${IMAGE:=}"         # ami-…, in place of these two
: "${GROUP_NAME:=neuron-di-trn1}" # security group, placement group, instances
: "${MORE_EFA:=efa-only}" # the interfaces beside the first one: efa gives each an IP address, too
: "${DISK_GIB:=500}"   # system, packages, weights, what was compiled
: "${SSH_FROM:=}"      # who may log in, such as 203.0.113.7/32
: "${RESERVATION:=}"   # cr-…, where you have one …
: "${IS_CAPACITY_BLOCK:=}" # … and yes, where it is a Capacity Block
: "${PLACEMENT_GROUP:=}"   # in place of one that the step makes: a reservation's own
