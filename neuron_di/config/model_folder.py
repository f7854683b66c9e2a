"""Whether `--model` names a folder of this machine, or a model of the hub."""

from pathlib import Path

from neuron_di.errors import CheckpointError


def local_folder(model: str) -> Path | None:
    """The folder that it names; None for a hub id, which is NAME or OWNER/NAME.

    Raises CheckpointError for a path where no folder is. Nothing is loaded to find that out, so
    who starts processes for a model asks first.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{model} is a file: give the folder that has config.json")
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"model folder {model} does not exist")
    return None
