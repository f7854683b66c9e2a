"""The flags of the device check. Light: they are read by a Python that may have nothing else."""

import argparse
import tempfile
from pathlib import Path

from benchmarks.device_check.parts import BY_NAME, PARTS
from benchmarks.device_check.settings import ROOT

MODULE = "benchmarks.device_check"
OUT_DEFAULT = ROOT / "build" / "device-check"
FULL_SHAPES, QUICK_SHAPES, SMALL_SHAPES = ("1b", "8b"), ("1b",), ("toy",)


def make_parser() -> argparse.ArgumentParser:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Run on a GPU what has not run on one yet, and write a report of it.",
        epilog=f"Parts, in their order: {names}. Exit codes: 0 nothing failed and every figure "
        "keeps its target, 1 something does not, 2 the run could not start.",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(BY_NAME),
        metavar="PART",
        help="only these (default: all)",
    )
    parser.add_argument(
        "--skip", nargs="+", choices=list(BY_NAME), metavar="PART", default=[], help="not these"
    )
    parser.add_argument(
        "--missing", action="store_true", help="not those that the report in --out has already"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT_DEFAULT,
        help="folder of the report; what one in it has of other parts stays (build/device-check)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, help="end within so many: parts that no longer fit are skipped"
    )
    parser.add_argument("--quick", action="store_true", help="the small model, fewer rounds")
    parser.add_argument(
        "--shapes", nargs="+", choices=FULL_SHAPES, help="models: 1b, 8b (default: both)"
    )
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "neuron-di-device-check",
        help="folder for the random checkpoints, up to 19 GB; they stay there (temporary folder)",
    )  # fmt: skip
    parser.add_argument(
        "--wheels", type=Path, help="folder of wheels that are unpacked beside what is installed"
    )
    parser.add_argument(
        "--mps", action="store_true", help="measure 1P1D under a CUDA MPS server of its own, too"
    )
    parser.add_argument(
        "--rehearse", action="store_true",
        help="without a GPU: Triton's interpreter, a simulated CUDA runtime, a toy model",
    )  # fmt: skip
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FOLDER",
        help="run nothing: put the reports of these folders together in --out",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser


def command_words(options: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The command that gives these options. Paths are not shown."""
    words = [f"python -m {MODULE}"]
    for name, value in vars(options).items():
        if value == getattr(defaults, name):
            continue
        flag = f"--{name}"
        if value is True:
            words.append(flag)
        elif isinstance(value, Path):
            words.append(f"{flag} PATH")
        else:
            words.append(" ".join([flag, *map(str, value if isinstance(value, list) else [value])]))
    return " ".join(words)
