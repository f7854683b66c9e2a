"""How the makers of a model would have its tokens drawn: Hugging Face's generation_config.json."""

from pathlib import Path

import msgspec

from neuron_di.errors import BadRequest, CheckpointError
from neuron_di.models.spec import read_json_object
from neuron_di.wire import SamplingDefaults, SamplingParams
from neuron_di.wire.sampling_rules import check_sampling


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Of a checkpoint. What is not in the file, or null, has none.

    Raises CheckpointError for a value that no request could have.
    """
    path = folder / "generation_config.json"
    known = read_json_object(path) if path.exists() else {}
    fields = {name: known[name] for name in SamplingDefaults.__struct_fields__ if name in known}
    if fields.get("top_k") == -1:  # off, as requests may say it, too
        fields["top_k"] = 0
    try:
        defaults = msgspec.convert(fields, SamplingDefaults)
        check_sampling(SamplingParams(**defaults.given()))
    except (msgspec.ValidationError, BadRequest) as error:
        words = error.message if isinstance(error, BadRequest) else str(error)
        raise CheckpointError(
            f"{path}: {words}; without these defaults: --sampling-defaults openai"
        ) from None
    return defaults
