"""Whether `--model` names a folder of this machine, or a model of the hub."""

import os
from pathlib import Path

from neuron_di.errors import CheckpointError

_POINTER = b"version https://git-lfs"


def local_folder(model: str) -> Path | None:
    """The folder that it names; None for a hub id, which is NAME or OWNER/NAME.

    Raises CheckpointError for a path where no folder is. Nothing is loaded to find that out, so
    who starts processes for a model asks first.
    """
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
        if is_folder:
            os.stat(os.path.join(path, "."))  # as all that lies in it will be looked for
    except (OSError, RuntimeError) as error:  # too long, not allowed, nobody's home
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot look for the model folder {model}: {reason}") from None
    if is_folder:
        return path
    if is_file:
        raise CheckpointError(f"{model} is a file: give the folder that has config.json")
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"model folder {model} does not exist")
    return None


def require_no_pointer(path: Path) -> None:
    """CheckpointError where only Git LFS' pointer to the file lies, as in a clone without it."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: run git lfs pull")


def model_name_of(model: str) -> str:
    """What clients call a model of which nothing else is said: its folder, or its name in the hub.

    A folder may be given as `.` or `..`, too.
    """
    return os.path.basename(os.path.abspath(os.path.expanduser(model)))
