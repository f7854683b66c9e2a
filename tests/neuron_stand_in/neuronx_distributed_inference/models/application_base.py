"""Compile, load and warm up: what all models have in common."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch_neuronx  # noqa: F401 - the real one does so, too: it registers what torch then has
from stand_in import artifact
from stand_in.nxd_model import NxdModel
from stand_in.sharding import kv_map_of

from neuron_di.models import ModelSpec, ModelWeights
from neuronx_distributed_inference.models.config import (
    CONFIG_FILE,
    InferenceConfig,
    NeuronConfig,
    to_dict,
)
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

COMPILED_MODEL_FILE_NAME = artifact.COMPILED_MODEL_FILE_NAME
_NOT_MODEL = ("neuron_config", "fused_spec_config", "metadata", "num_cores_per_group")

logger = logging.getLogger("Neuron")


class TracedModel:
    """What a loaded model.pt is: a callable, and the runtime's view of the model."""

    def __init__(self, nxd_model: NxdModel) -> None:
        self.nxd_model = nxd_model

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.nxd_model.forward(inputs)


class NeuronApplicationBase(torch.nn.Module):
    """A model in a folder: a checkpoint to compile, or what compile() wrote, to load."""

    def __init__(
        self,
        model_path: str,
        config: InferenceConfig | None = None,
        neuron_config: NeuronConfig | None = None,
    ) -> None:
        super().__init__()
        self.model_path = os.path.join(os.path.normpath(model_path), "")
        self.config = self.get_config_cls().load(self.model_path) if config is None else config
        if neuron_config is not None:
            self.config.neuron_config = neuron_config
        self.neuron_config = self.config.neuron_config
        self.on_device_sampling = self.neuron_config.on_device_sampling_config is not None
        self.models: list[ModelWrapper] = []
        self.traced_model: TracedModel | None = None
        self.is_compiled = (Path(self.model_path) / COMPILED_MODEL_FILE_NAME).is_file()
        self.is_loaded_to_neuron = False

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        raise NotImplementedError("get_config_cls is not implemented")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return cls.get_config_cls().get_neuron_config_cls()

    def compile(self, compiled_model_path: str | Path, debug: bool = False) -> None:
        """Write neuron_config.json, model.pt, and weights/ with save_sharded_checkpoint.

        Needs no device. The work folder, BASE_COMPILE_WORK_DIR, is shared by all compilations.
        """
        folder = Path(compiled_model_path)
        spec, compiled = self._spec(), self._compiled()
        self.config.save(folder)
        work_folder = Path(os.environ.get("BASE_COMPILE_WORK_DIR", "/tmp/nxd_model/"))
        for wrapper in self.models:
            for number, bucket in enumerate(wrapper.neuron_config.buckets):
                logger.info("Compiling %s for a bucket of %d", wrapper.tag, bucket)
                wrapper.config.save(work_folder / wrapper.tag / f"_tp0_bk{number}")
        artifact.write_graphs(folder, compiled)
        if self.neuron_config.save_sharded_checkpoint and not self.neuron_config.skip_sharding:
            weights = artifact.read_checkpoint(
                self._checkpoint_folder(), spec, self.neuron_config.torch_dtype
            )
            artifact.write_shards(folder / "weights", weights, spec, self.neuron_config.tp_degree)
        self.is_compiled = True

    def load(
        self,
        compiled_model_path: str | Path,
        start_rank_id: int | None = None,
        local_ranks_size: int | None = None,
        skip_warmup: bool = False,
    ) -> None:
        """Put a compiled model on this process's cores.

        RuntimeError when it was compiled for something else than the configuration says, or when
        there are too few cores or too little memory.
        """
        if (start_rank_id or 0, local_ranks_size or self.neuron_config.tp_degree) != (
            0,
            self.neuron_config.tp_degree,
        ):
            raise NotImplementedError("the stand-in has all ranks in one process")
        folder = Path(compiled_model_path)
        compiled = artifact.read_graphs(folder)
        self._require_same(compiled)
        sampling = self.neuron_config.on_device_sampling_config
        nxd_model = NxdModel(
            compiled,
            global_topk=256 if sampling is None else sampling.global_topk,
            is_greedy=sampling is None or not sampling.do_sample,
        )
        nxd_model.initialize(self._load_weights(folder), self._spec())
        self.traced_model = TracedModel(nxd_model)
        for wrapper in self.models:
            wrapper.model = self.traced_model
        self.is_loaded_to_neuron = True
        if self.neuron_config.skip_warmup or skip_warmup:
            logger.info("Skipping model warmup")
        else:
            self.warmup()

    def warmup(self) -> None:
        """Run each graph once. It leaves garbage in the KV; errors of the device are ignored."""
        started = time.monotonic()
        assert self.traced_model is not None
        nxd_model = self.traced_model.nxd_model
        nxd_model.is_warming_up = True
        for wrapper in self.models:
            for example in wrapper.input_generator():
                try:
                    nxd_model.forward(example)
                except RuntimeError as error:
                    logger.warning("Ignored while warming up %s: %s", wrapper.tag, error)
        nxd_model.is_warming_up = False
        logger.info("Warmup completed in %.3f s", time.monotonic() - started)

    def _load_weights(self, folder: Path) -> ModelWeights:
        config, spec = self.neuron_config, self._spec()
        if config.save_sharded_checkpoint:
            return artifact.read_shards(
                folder / "weights", spec, config.torch_dtype, config.tp_degree
            )
        return artifact.read_checkpoint(self._checkpoint_folder(), spec, config.torch_dtype)

    def _checkpoint_folder(self) -> Path:
        """Where the configuration came from, if that is still there."""
        origin = getattr(self.config, "_name_or_path", None)
        return Path(origin if origin and Path(origin).is_dir() else self.model_path)

    def _require_same(self, compiled: artifact.Compiled) -> None:
        wanted = self._compiled()
        names = [
            name
            for name in artifact.Compiled.__dataclass_fields__
            if getattr(compiled, name) != getattr(wanted, name)
        ]
        if names:
            raise RuntimeError(
                "model.pt does not fit the configuration: "
                + ", ".join(
                    f"{name} is {getattr(compiled, name)}, not {getattr(wanted, name)}"
                    for name in names
                )
            )

    def _spec(self) -> ModelSpec:
        return ModelSpec.from_config(self._model_fields(), eos_token_id=None, source=CONFIG_FILE)

    def _model_fields(self) -> dict[str, Any]:
        fields = to_dict(self.config)
        return {
            name: fields[name]
            for name in sorted(fields)
            if name not in _NOT_MODEL and not name.startswith("_")
        }

    def _compiled(self) -> artifact.Compiled:
        """What compiling with this configuration gives. Refuses what can't be compiled."""
        config = self.neuron_config
        if config.ctx_batch_size != 1:
            raise AssertionError(
                f"ctx_batch_size={config.ctx_batch_size}: continuous batching encodes one sequence"
            )
        config.require_modelled()
        spec = self._spec()
        if spec.sliding_window is not None:
            raise NotImplementedError("the stand-in has no sliding window")
        kv_map_of(spec, config.tp_degree)
        context, token = self.models
        return artifact.Compiled(
            tp_degree=config.tp_degree,
            batch_size=config.tkg_batch_size,
            num_slots=config.kv_cache_batch_size + config.kv_cache_padding_size,
            max_length=config.max_length,
            context_buckets=tuple(context.neuron_config.buckets),
            token_buckets=tuple(token.neuron_config.buckets),
            torch_dtype=str(config.torch_dtype).removeprefix("torch."),
            k_cache_transposed=config.k_cache_transposed,
            kv_cache_tiling=config.kv_cache_tiling,
            apply_seq_ids_mask=config.apply_seq_ids_mask,
            async_mode=config.async_mode,
            on_device_sampling=self.on_device_sampling,
            output_logits=config.output_logits,
            logical_nc_config=config.logical_nc_config,
            model=self._model_fields(),
        )
