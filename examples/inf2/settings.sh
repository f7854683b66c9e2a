# shellcheck shell=bash disable=SC2034  # used by the files of neuron_common
# What differs from instance to instance; ../neuron_common/defaults.sh and ports.sh have the rest.
# A variable of the environment goes before: TP=4 ./4-serve.sh

# The instance. NeuronCores are numbered over the whole host. It has no EFA.
: "${INSTANCE_TYPE:=inf2.48xlarge}"
: "${NUM_CORES:=24}"
: "${NUM_EFA:=0}"
DEGREES=() # how many NeuronCores the runtime joins: any number, as far as is known

# The model, and what it is compiled for. TP must divide its attention heads and its MLP's columns.
: "${MODEL:=Qwen/Qwen3-8B}"
: "${MODEL_NAME:=qwen3-8b}" # as clients say it
: "${TP:=8}"                # NeuronCores of a worker: prefill on 0-7, decode on 8-15

# Several hosts. Name, role, number of its host, slot of NeuronCores (0: 0-7, 1: 8-15, 2: 16-23).
WORKERS=("prefill-0 prefill 0 0" "decode-0 decode 1 0")
MORE_WORKERS=("decode-1 decode 1 1") # step 7
COMBINED_WORKERS=("combined-0 both 0 1" "combined-1 both 1 1") # step 6, while it runs
# KV goes by the host's memory, between hosts by TCP. AWS gives one connection 10 Gbit/s at most in
# a placement group, and the instance 100.
WORKER_ENVIRONMENT=(NEURON_DI_TRANSFER=shm)
[ -z "$HOSTS" ] || WORKER_ENVIRONMENT=(NEURON_DI_TRANSFER=tcp NEURON_DI_TRANSFER_STREAMS=10)

# Step 1.
: "${SDK:=2.28}" # the last one whose NxD Inference is for Inf2
: "${GROUP_NAME:=neuron-di-inf2}" # security group, placement group, instances
