# shellcheck shell=bash disable=SC2034  # used by the files of neuron_common
# What is particular to this tutorial. A variable of the environment goes before: TP=16 ./4-serve.sh

# The instance: 128 NeuronCores, of which the runtime makes 64 logical ones. All numbers here are of
# logical cores, over the whole host; each Trainium2 device has an EFA of its own.
: "${INSTANCE_TYPE:=trn2.48xlarge}"
: "${NUM_CORES:=64}"
: "${NUM_EFA:=16}"

# Of AWS's image, what has NxD Inference in it.
: "${SDK_ENVIRONMENT:=/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference}"

# The model, and what it is compiled for. TP must divide its attention heads and its MLP's columns.
: "${MODEL:=Qwen/Qwen3-32B}"
: "${MODEL_NAME:=qwen3-32b}" # as clients say it
: "${TP:=32}"                # logical cores of a worker: prefill on 0-31, decode on 32-63
: "${CONTEXT_TOKENS:=8192}"  # prompt and answer together
: "${DECODE_BATCH:=4}"       # requests that a worker decodes together
: "${DTYPE:=bfloat16}"
: "${READY_TIMEOUT_S:=3600}" # until a worker has loaded
: "${STOP_TIMEOUT_S:=120}"   # until a process that was asked to end has drained

# Several hosts. Name, role, number of its host, slot of logical cores (0: 0-31, 1: 32-63).
WORKERS=("prefill-0 prefill 0 0" "decode-0 decode 1 0")
MORE_WORKERS=("decode-1 decode 1 1") # step 7
WORKER_ENVIRONMENT=(
    NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1
    NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT="$BOOTSTRAP_PORT"
    FI_EFA_ENABLE_SHM_TRANSFER=0
)

# Step 6.
: "${BENCH_LOAD:=--requests 100 --concurrency 4 --input-tokens 1024 --output-tokens 128}"

# Step 1. REGION, SUBNET and KEY_NAME have no defaults.
: "${COUNT:=1}"        # instances
: "${SDK:=2.31}"       # the last one that has NxD Inference
: "${IMAGE_NAME:=Deep Learning AMI Neuron (Ubuntu 24.04)}"
: "${IMAGE:=}"         # ami-…, in place of these two
: "${GROUP_NAME:=neuron-di-trn2}" # security group, placement group, instances
: "${MORE_EFA:=efa-only}" # the interfaces beside the first one: efa gives each an IP address, too
: "${DISK_GIB:=1000}"  # system, packages, weights, what was compiled
: "${SSH_FROM:=}"      # who may log in, such as 203.0.113.7/32
: "${RESERVATION:=}"   # cr-…, where you have one …
: "${IS_CAPACITY_BLOCK:=}" # … and yes, where it is a Capacity Block: Trn2 often is
: "${PLACEMENT_GROUP:=}"   # in place of one that the step makes: a reservation's own
