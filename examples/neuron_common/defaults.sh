# shellcheck shell=bash disable=SC2034  # used by the other files of this folder
# Settings that are the same on every instance; a tutorial's settings.sh has those that are not, and
# goes before. A variable of the environment goes before both: SSH_FROM=203.0.113.7/32 ./1-launch.sh

# Of AWS's image, what has NxD Inference in it.
: "${SDK_ENVIRONMENT:=/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference}"

# What the model is compiled for.
: "${CONTEXT_TOKENS:=8192}" # prompt and answer together
: "${DECODE_BATCH:=4}"      # requests that a worker decodes together
: "${DTYPE:=bfloat16}"

: "${READY_TIMEOUT_S:=3600}" # until a worker has loaded
: "${STOP_TIMEOUT_S:=120}"   # until a process that was asked to end has drained

# Step 6.
: "${BENCH_LOAD:=--requests 100 --concurrency 4 --input-tokens 1024 --output-tokens 128}"

# Step 1. REGION, SUBNET and KEY_NAME have no defaults.
: "${COUNT:=1}" # instances
: "${IMAGE_NAME:=Deep Learning AMI Neuron (Ubuntu 24.04)}"
: "${IMAGE:=}"             # ami-…, in place of the latest of that name which says SDK
: "${MORE_EFA:=efa-only}"  # the interfaces beside the first: efa gives each an IP address, too
: "${DISK_GIB:=512}"       # system, packages, weights, what was compiled
: "${SSH_FROM:=}"          # who may log in, such as 203.0.113.7/32
: "${RESERVATION:=}"       # cr-…, where you have one …
: "${IS_CAPACITY_BLOCK:=}" # … and yes, where it is a Capacity Block
: "${PLACEMENT_GROUP:=}"   # in place of one that the step makes: a reservation's own
