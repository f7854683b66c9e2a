"""`neuron-di compile`: compile a model for a device ahead of serving it there."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from rich.console import Console

from neuron_di.clock import now_s
from neuron_di.config import CompileOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import setup_logging
from neuron_di.stop_signals import raising_on

_LINE_EVERY_S = 60.0  # where nobody sees a line change
_LOOK_EVERY_S = 1.0


def run_compile(options: CompileOptions) -> int:
    """Compile, or find it compiled. Returns the exit code. Raises ConfigError."""
    setup_logging("compile", options.log.log_level, options.log.log_format)
    if options.device != "neuron":
        raise ConfigError(
            f"nothing is compiled for --device {options.device}: it runs the checkpoint as it is",
            param="device",
        )
    from neuron_di.backends.neuron_artifact import artifacts_root
    from neuron_di.backends.neuron_compile import compile_artifact, num_bytes_in
    from neuron_di.backends.neuron_plan import manifest_of
    from neuron_di.models import ModelSpec, resolve_checkpoint

    folder = resolve_checkpoint(options.model)
    engine = options.engine()
    manifest = manifest_of(engine, ModelSpec.from_folder(folder), folder)
    root = artifacts_root(engine.neuron.neuron_artifacts, os.environ)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    start_s = now_s()
    with (
        raising_on(signal.SIGTERM),  # so that nothing half-made is left
        _others_say_it_on_stderr(),
        _progress(console, lambda: num_bytes_in(root, manifest.key)),
    ):
        compiled = compile_artifact(manifest, folder, root, console.print)
    words = f"compiled in {now_s() - start_s:.0f} s" if compiled.is_new else "compiled before"
    console.print(f"{words}: {manifest.key}")
    sys.stdout.write(f"{compiled.folder}\n")
    return 0


@contextmanager
def _others_say_it_on_stderr() -> Iterator[None]:
    """Meanwhile: packages and compilers print what they do, and our output is the folder's name."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb", buffering=0) as own, redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(own.fileno(), 1)


@contextmanager
def _progress(console: Console, num_bytes: Callable[[], int]) -> Iterator[None]:
    """Meanwhile, say how long it has taken and how much is there: the compiler says nothing.

    In a terminal as a line that changes, else as a line now and then.
    """
    is_over = threading.Event()
    start_s = now_s()

    def words() -> str:
        return f"compiling: {now_s() - start_s:.0f} s, {num_bytes() / 2**20:.1f} MiB so far"

    def tell() -> None:
        if not console.is_terminal:
            while not is_over.wait(_LINE_EVERY_S):
                console.print(words())
            return
        with console.status(words()) as status:
            while not is_over.wait(_LOOK_EVERY_S):
                status.update(words())

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
