"""A model in NxD Inference: compiled, loaded and run through its documented classes.

Sources: the public repository aws-neuron/neuronx-distributed-inference (application_base.py,
model_base.py, model_wrapper.py, config.py, kvcache) and its example generation_demo.py.

Every call but those of this module's functions is made by one thread. Imports the packages, which
read the environment then: which cores are this process's must be said before.

So far this has run against a stand-in for NxD Inference only, which keeps KV in a simulator's
memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_di.backends.neuron_artifact import Settings
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec

SEQ_IDS_PAD = 128  # positions behind a slot's last that rows without a request write to
_PREFIX = "kv_mgr.past_key_values."
_IN_TORCHSCRIPT, _REASON = "failed in the TorchScript interpreter", "RuntimeError: "


def neuron_config_of(settings: Settings) -> dict[str, Any]:
    """What we ask of NxD Inference, and what its own file must say afterwards, as JSON has it.

    No sampling on the device: logits come back, and ours draws as on every other device.
    """
    config: dict[str, Any] = {
        "tp_degree": settings.tp,
        "batch_size": settings.slots,
        "ctx_batch_size": 1,
        "tkg_batch_size": settings.slots,
        "kv_cache_batch_size": settings.slots,
        "is_continuous_batching": True,
        "seq_len": settings.context_tokens,
        "max_context_length": settings.context_tokens,
        "max_length": settings.context_tokens,
        "enable_bucketing": True,
        "context_encoding_buckets": list(settings.prefill_buckets),
        "token_generation_buckets": list(settings.decode_buckets),
        "padding_side": "right",
        "torch_dtype": settings.dtype,
        "k_cache_transposed": settings.k_transposed,
        "apply_seq_ids_mask": True,
        "async_mode": False,
        "save_sharded_checkpoint": True,
    }
    if settings.logical_cores:
        config["logical_nc_config"] = settings.logical_cores
    return config


def compile_model(settings: Settings, model_folder: Path, out: Path) -> None:
    """Compile the graphs and shard the weights. Blocks, for minutes. ConfigError if it fails."""
    try:
        model_class = _class_of(settings)
        from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

        wanted = neuron_config_of(settings) | {"torch_dtype": getattr(torch, settings.dtype)}
        neuron_config = model_class.get_neuron_config_cls()(**wanted)
        config = model_class.get_config_cls()(
            neuron_config, load_config=load_pretrained_config(str(model_folder))
        )
        # The context is no longer than a model's window, so it has no effect but this one: with it
        # NxD Inference passes over apply_seq_ids_mask, and writes into slots that wait.
        config.sliding_window = None
        model_class(str(model_folder), config).compile(f"{out}/")
    except Exception as error:
        raise ConfigError(f"NxD Inference could not compile the model: {_words(error)}") from error


class NxdiModel:
    """A loaded model. Dimensions: B rows, V vocabulary."""

    def __init__(self, model: Any, settings: Settings, spec: ModelSpec) -> None:
        self._model = model
        self._settings = settings
        self._num_vocab = spec.num_vocab
        from neuronx_distributed_inference.modules.generation.sampling import (
            prepare_sampling_params,
        )

        self._sampling_params = prepare_sampling_params

    @classmethod
    def load(cls, folder: Path, settings: Settings, spec: ModelSpec) -> "NxdiModel":
        """From an artifact, onto the cores.

        ConfigError where NxD Inference cannot; RuntimeError, with the reason, where the Neuron
        runtime refuses: the graphs and their start are TorchScript.
        """
        try:
            model = _class_of(settings)(f"{folder}/")
            model.load(f"{folder}/")
            return cls(model, settings, spec)
        except Exception as error:
            if _IN_TORCHSCRIPT in str(error):
                raise RuntimeError(_words(error)) from error
            raise ConfigError(
                f"NxD Inference could not load the compiled model in {folder}: {_words(error)}. "
                "Mend: should its files be damaged, delete that folder and run neuron-di compile "
                "again, which else finds it compiled before"
            ) from error

    def state_tensors(self) -> list[list[Any]]:
        """Each rank's KV tensors, on the device: keys of layer 0, values of layer 0, keys of 1, …

        ConfigError where the state does not look as documented.
        """
        try:
            state = self._model.context_encoding_model.model.nxd_model.state
            ranks = [_in_order(dict(tensors)) for tensors in state]
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this version of NxD Inference shows its KV in another way: {_words(error)}"
            ) from None
        return ranks

    def prefill(self, slot: int, token_ids: Sequence[int]) -> Tensor:
        """Compute a whole prompt into a slot. Its last position's logits [V], float32."""
        num_tokens = len(token_ids)
        ids = torch.tensor([token_ids], dtype=torch.int64)
        positions = torch.arange(num_tokens)[None]
        # Said, not left to be inferred: of one position alone NxD Inference infers no mask.
        mask = torch.ones_like(ids)
        if num_tokens == 1:
            # NxD Inference takes the logits where the position is greatest, and pads positions
            # with 1, so that of one token it would take padding's. Here it has nothing to pad.
            width = self._settings.prefill_buckets[-1] - 1
            ids, mask = (torch.nn.functional.pad(each, (0, width)) for each in (ids, mask))
            positions = torch.zeros_like(ids)
        logits_BV = self._forward(ids, positions, torch.tensor([slot]), mask)
        return logits_BV[0]

    def decode(
        self, slots: Sequence[int], token_ids: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """One more token for each of these slots, which ascend. Logits [B, V], float32.

        `positions` are where the tokens come, none of them 0: there a prompt would begin.
        """
        assert all(position > 0 for position in positions), "a decode step at position 0"
        assert list(slots) == sorted(set(slots)), "slots ascend"
        return self._forward(
            torch.tensor(token_ids)[:, None],
            torch.tensor(positions)[:, None],
            torch.tensor(slots),
            None,
        )

    def _forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, mask: Tensor | None
    ) -> Tensor:
        """NxD Inference pads rows and positions to its graphs, and casts to int32."""
        num_rows = len(ids)
        greedy = self._sampling_params(  # ignored without sampling on the device, but checked
            batch_size=num_rows, top_k=[1], top_p=[1.0], temperature=[1.0]
        )
        with torch.inference_mode():
            out = self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                seq_ids=slots,
                sampling_params=greedy,
            )
        logits_BTV: Tensor = out.logits
        # The vocabulary may be padded to a multiple of the cores.
        return logits_BTV[:num_rows, -1, : self._num_vocab].float()


def _class_of(settings: Settings) -> Any:
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES

    # AWS runs Mistral by Llama's classes, and only its latest table says so.
    names = (settings.family, "llama") if settings.family == "mistral" else (settings.family,)
    for name in names:
        if name in MODEL_TYPES:
            return MODEL_TYPES[name]["causal-lm"]
    raise ConfigError(f"this version of NxD Inference has no {settings.family}: take a newer one")


def _in_order(tensors: dict[str, Any]) -> list[Any]:
    """By number: the dictionary's own order says nothing. Combined views are left out."""
    numbers = {
        int(name.removeprefix(_PREFIX)): tensor
        for name, tensor in tensors.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal()
    }
    if sorted(numbers) != list(range(len(numbers))):
        raise ValueError(f"KV tensors have the numbers {sorted(numbers)}")
    return [numbers[number] for number in range(len(numbers))]


def _words(error: BaseException) -> str:
    """In one line. TorchScript tells where it was first, and the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if _IN_TORCHSCRIPT in lines[0]:
        reasons = [line for line in lines if line.startswith(_REASON)] or lines
        return f"{type(error).__name__}: {reasons[-1].removeprefix(_REASON)}"
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
