"""`neuron-di conformance A B`: two OpenAI endpoints, compared field by field.

Exit codes: 0 they agree (what one refuses by name is only listed), 1 they differ or one breaks a
rule, 2 nothing could be tried, 130 interrupted before either showed.

Next: neuron_di/testing/conformance/command.py
"""

import argparse

LONG_PROMPT_CHARS = 100_000


def add_conformance_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.usage = "%(prog)s URL_A URL_B [flags]"
    parser.add_argument("url_a", metavar="URL_A", nargs="?", help="an OpenAI endpoint")
    parser.add_argument("url_b", metavar="URL_B", nargs="?", help="the one to compare it with")
    parser.add_argument(
        "--model", metavar="NAME", default="", help="the model to ask (default: the first listed)"
    )
    parser.add_argument(
        "--model-b", metavar="NAME", default="", help="what B calls it (default: as --model)"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only cases of such a name, as in `--case 'stop-*'`; repeatable",
    )
    parser.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="instead, N requests that are drawn at random",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="K",
        help="the first of them: random-K (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        choices=("exact", "greedy", "shape"),
        default="exact",
        help="which answers must be equal: greedy and seeded (exact), greedy, or none (shape) "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--logprob-tolerance",
        type=float,
        default=1e-4,
        metavar="X",
        help="how far two logprobs may be apart (default: %(default)s)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="null is not absent, errors have the same code, and both support the same fields",
    )
    parser.add_argument(
        "--long-prompt-chars",
        type=int,
        default=LONG_PROMPT_CHARS,
        metavar="N",
        help="size of the longest prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=4,
        metavar="N",
        help="cases that run at the same time (default: %(default)s)",
    )
    parser.add_argument("--key-env-a", metavar="NAME", help="environment variable with A's API key")
    parser.add_argument("--key-env-b", metavar="NAME", help="environment variable with B's API key")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--list", action="store_true", help="print the cases and end")


def run_conformance_command(flags: argparse.Namespace) -> int:
    """Run what the flags say. Returns the exit code. Raises ConfigError."""
    from neuron_di.testing.conformance.command import run_conformance  # the test kit: only here

    return run_conformance(flags)
