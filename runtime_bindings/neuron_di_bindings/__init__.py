"""The metal: compiled kernels, shared memory, later libnrt. Imports nothing of neuron_di."""
