"""What the stand-in packages beside this one are made of: no part of any real package.

`neuronx_distributed_inference` and `torch_neuronx` in this folder stand in for AWS's packages of
those names, so that code which drives them can be tested without Neuron hardware. They offer what
AWS's public documentation and sources say the packages offer, as far as this project calls it,
and compute with this project's own CPU model. The KV lies in device tensors, which this project's
simulator of libnrt has; nothing of it is kept anywhere else.

They are not AWS's code and contain none of it. They were built from public documentation alone and
never compared with the real packages on hardware. What they prove is that a caller keeps the
documented rules; where the real packages would compute something wrong without a word, the
stand-in either does so too (writes into idle slots) or raises `RuleBroken`.

Put this folder on PYTHONPATH, set NEURON_DI_LIBNRT to the simulator, and NEURON_RT_NUM_CORES or
NEURON_RT_VISIBLE_CORES.

    rules           RuleBroken
    cores           libnrt, initialised once in a process
    device_tensor   what the state's tensors look like from outside
    kv_state        the KV of all ranks: read a slot, write positions
    sharding        a model's weights with each KV head as often as ranks hold it
    artifact        the files that compile() writes
    nxd_model       the compiled graphs: exact shapes in, logits or tokens out
    sampling        on-device sampling
    closed_classes  torch.classes.neuron and torch.ops.neuron: the closed transfer engine
"""
