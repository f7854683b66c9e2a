"""The `neuron-di` command. Exit codes: 0 fine, 1 failed while running, 2 could not start."""

import argparse
import asyncio
import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Callable
from textwrap import fill
from typing import Any

from neuron_di import __version__
from neuron_di.bench import add_bench_flags, run_bench_command
from neuron_di.compile_command import run_compile
from neuron_di.config import (
    CompileOptions,
    FlagParser,
    ProxyOptions,
    ServeOptions,
    WorkerOptions,
    add_flags,
    load_options,
)
from neuron_di.conformance_command import add_conformance_flags, run_conformance_command
from neuron_di.doctor import add_doctor_flags, run_doctor_command
from neuron_di.errors import ConfigError, NeuronDiError
from neuron_di.key_command import add_key_flags, run_key_command
from neuron_di.obs import LaunchReport, say, setup_logging
from neuron_di.order_commands import (
    add_drain_flags,
    add_role_flags,
    run_drain_command,
    run_role_command,
)
from neuron_di.stop_signals import end_by_sigterm_while_starting
from neuron_di.terminal_text import printable
from neuron_di.transfer_bench import add_bench_transfer_flags, run_bench_transfer

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)  # the last: ulimit -f
_DESCRIPTION = (
    "A disaggregated LLM server: prompts are computed by prefill workers, answers by decode "
    "workers, and a proxy speaks the OpenAI API to clients."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit code; errors are one line on standard error."""
    # Else the interpreter's last act is to look through all that torch has made, for 0.3 s.
    atexit.register(gc.freeze)
    _open_what_is_closed()
    try:
        _check_folder()
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read, say `head`, has seen enough
        _write_no_more()
        return 0
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return 0  # rich has done the same
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _write_no_more()
        print(f"neuron-di: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    except NeuronDiError as error:
        print(f"neuron-di: {printable(error.message)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _open_what_is_closed() -> None:
    """Nobody gives a closed stream away: else a socket would have its number, and its output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    # Nobody wants to see anything; what cannot be spelled in the terminal's encoding is "?".
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _check_folder() -> None:
    """Libraries end the process without a word of why where the folder it is in is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted: change to another") from None


def _write_no_more() -> None:
    """Nothing may be left to be written at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _key(flags: argparse.Namespace) -> int:
    text = run_key_command(flags)
    try:
        print(text, flush=True)
    except OSError as error:
        if flags.verb != "create":
            raise
        _write_no_more()
        print(
            f"neuron-di: a key was made, and nobody saw it: {error.strerror}. Mend: take the "
            f"newest of `neuron-di key list {flags.file}` out with `neuron-di key revoke`",
            file=sys.stderr,
        )
        return 1
    return 0


def _run(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    flags = parser.parse_args(arguments)
    if flags.command == "key":
        return _key(flags)
    if flags.command == "bench":
        return run_bench_command(flags)
    if flags.command == "bench-transfer":
        return run_bench_transfer(flags)
    if flags.command == "conformance":
        return run_conformance_command(flags)
    if flags.command == "doctor":
        return run_doctor_command(flags)
    if flags.command == "drain":
        return run_drain_command(flags, _key_of(flags))
    if flags.command == "role":
        return run_role_command(flags, _key_of(flags))
    if flags.command == "status":
        from neuron_di.status import show_status

        return show_status(flags.url, key=_key_of(flags), as_json=flags.json)
    if flags.command == "top":
        from neuron_di.top import show_top

        return show_top(flags.url, key=_key_of(flags), once=flags.once)
    end_by_sigterm_while_starting()
    options_class, run = _COMMANDS[flags.command]
    return run(load_options(options_class, flags, os.environ, flags.config))


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="neuron-di",
        usage="neuron-di COMMAND ...",
        description=fill(_DESCRIPTION, _HELP_COLUMNS) + "\n\n" + _overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"neuron-di {__version__}")
    commands = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=FlagParser,
        prog="neuron-di",
        help=argparse.SUPPRESS,  # the description has them, in groups
    )
    by_name = {
        name: commands.add_parser(name, description=summary)
        for group in _GROUPS.values()
        for name, summary in group.items()
    }
    for name, (options_class, _) in _COMMANDS.items():
        add_flags(by_name[name], options_class)
    for name in ("status", "top", "drain", "role"):
        _add_proxy_flags(by_name[name])
    by_name["status"].add_argument("--json", action="store_true", help="print the answer as JSON")
    by_name["top"].add_argument("--once", action="store_true", help="print one frame and end")
    add_drain_flags(by_name["drain"])
    add_role_flags(by_name["role"])
    add_key_flags(by_name["key"])
    add_bench_flags(by_name["bench"])
    add_bench_transfer_flags(by_name["bench-transfer"])
    add_conformance_flags(by_name["conformance"])
    add_doctor_flags(by_name["doctor"])
    return parser


def _overview() -> str:
    """All commands with a line for each, by group."""
    lines: list[str] = []
    for title, group in _GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<16}{summary}" for name, summary in group.items()), ""]
    return "\n".join(lines).rstrip()


def _add_proxy_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [flags]"
    parser.add_argument(
        "--url", default=_PROXY_URL, help="the proxy's address (default: %(default)s)"
    )
    parser.add_argument(
        "--key", help=f"an operator's API key; better in the variable {_KEY_VARIABLE}"
    )


def _key_of(flags: argparse.Namespace) -> str | None:
    key: str | None = flags.key
    return key or os.environ.get(_KEY_VARIABLE)


def _serve(options: ServeOptions) -> int:
    from neuron_di.serve_terminal import serve_until_stopped

    setup_logging("serve", options.log.log_level, options.log.log_format)
    return asyncio.run(serve_until_stopped(options))


def _proxy(options: ProxyOptions) -> int:
    from neuron_di_proxy.process import run_proxy

    # Of several, each by the name that the first one has for it.
    name = f"proxy-{options.sibling_index}" if options.sibling_index else "proxy"
    return _child(options, name, lambda: run_proxy(options))


def _worker(options: WorkerOptions) -> int:
    gc.disable()  # nothing is garbage while modules are loaded
    from neuron_di.worker import run_worker

    gc.freeze()  # nor later: looking through all of torch would hold a step up for 0.1 s
    gc.enable()
    return _child(options, options.worker_id or options.role, lambda: run_worker(options))


def _child(options: ProxyOptions | WorkerOptions, name: str, run: Callable[[], None]) -> int:
    """Run a process that may be a child of `serve`: tied to it, and heard by it if it fails."""
    setup_logging(name, options.log.log_level, options.log.log_format)
    if options.parent_pid is None:
        run()
        return 0
    from neuron_di_bindings.process import end_with_parent

    end_with_parent(options.parent_pid)
    try:
        run()
    except NeuronDiError as error:
        words = error.message.encode(errors="backslashreplace").decode()  # a file's name may be any
        say(LaunchReport(event="failed", message=words))
        return 2 if isinstance(error, ConfigError) else 1
    return 0


_KEY_VARIABLE = "KEY_NEURON_DI"  # whoever can list processes can read flags

_PROXY_URL = "http://127.0.0.1:8000"
_HELP_COLUMNS = 78

_GROUPS: dict[str, dict[str, str]] = {
    "serving": {
        "serve": "serve a model on this machine: a proxy and its workers",
        "proxy": "run the proxy alone",
        "worker": "run one worker alone",
        "compile": "compile a model for NeuronCores, once for each configuration",
    },
    "operating": {
        "status": "show which workers are there and what they do",
        "top": "watch workers, load and transfers, live",
        "drain": "let a worker finish its requests, end it, check that it is gone",
        "role": "change a worker's role while it runs, and check that it switched",
        "key": "make, list or revoke API keys",
    },
    "measuring and checking": {
        "bench": "measure an OpenAI endpoint: latencies, throughput, goodput",
        "bench-transfer": "measure how fast KV moves between two processes or two hosts",
        "conformance": "compare two OpenAI endpoints, field by field",
        "doctor": "check this machine, and say how to mend what is wrong",
    },
}

_COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "serve": (ServeOptions, _serve),
    "proxy": (ProxyOptions, _proxy),
    "worker": (WorkerOptions, _worker),
    "compile": (CompileOptions, run_compile),
}
