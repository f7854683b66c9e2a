"""The flags of `neuron-di bench`. Light: they are declared whatever the command."""

import argparse

from neuron_di.bench.presets import PRESETS

KEY_VARIABLE = "KEY_NEURON_DI"  # whoever can list processes can read flags
LENGTHS = "N, normal:MEAN,DEVIATION[,LEAST,MOST], uniform:LEAST,MOST or lognormal:MEDIAN,SIGMA[,…]"

_EPILOG = (
    "presets: "
    + "; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items())
    + f". An API key is taken from the variable {KEY_VARIABLE}. "
    "Exit codes: 0 all requests were answered, 1 some failed or figures could not be written, "
    "2 the run could not start, 130 after Ctrl-C."
)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags. Without a default here, a setting's own default holds."""
    parser.usage = "%(prog)s --url URL [--url URL_B] [flags]"
    parser.epilog = _EPILOG.replace("%", "%%")
    _add_endpoint_flags(parser.add_argument_group("endpoints"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_length_flags(parser.add_argument_group("requests"))
    _add_output_flags(parser.add_argument_group("figures"))


def _add_endpoint_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--url",
        action="append",
        default=[],
        dest="urls",
        metavar="URL",
        help="an endpoint; several take turns, slice by slice, with the same requests",
    )
    group.add_argument(
        "--name",
        action="append",
        dest="names",
        metavar="NAME",
        help="what to call it, once for each --url (default: A, B, …)",
    )
    group.add_argument("--model", metavar="NAME", help="default: the only model that is listed")
    group.add_argument("--api", choices=("completions", "chat"), help="default: completions")
    group.add_argument("--temperature", type=float, metavar="X", help="default: 0")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="answers as long as asked for, where the endpoint takes the field (default)",
    )
    group.add_argument(
        "--timeout-s", type=float, metavar="SECONDS", help="of one request (default: 600)"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--preset", choices=sorted(PRESETS), help="flags of a known benchmark")
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="closed loop: this many requests open at a time (default: 4); "
        "with --rate, at most this many",
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="X",
        help="open loop: requests per second, or inf for all at once",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "burst"),
        help="of an open loop (default: poisson)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="X",
        help="shape of the gaps' gamma distribution for burst: 1 is Poisson, "
        "less is burstier (default: 1)",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="to each endpoint (default: 100, or all of a trace)",
    )
    group.add_argument(
        "--duration-s", type=float, metavar="SECONDS", help="send for this long, to each endpoint"
    )
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before, to each endpoint, that do not count (default: 4)",
    )
    group.add_argument(
        "--slices",
        type=int,
        metavar="N",
        help="turns of each endpoint (default: 1, with several endpoints 4)",
    )


def _add_length_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-tokens", metavar="LENGTHS", help=f"{LENGTHS} (default: 256)")
    group.add_argument("--output-tokens", metavar="LENGTHS", help="likewise (default: 64)")
    group.add_argument(
        "--shared-prefix-tokens",
        type=int,
        metavar="N",
        help="all prompts begin with the same tokens, this many (default: 0)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="replay a Mooncake JSONL or Azure CSV trace: its lengths, its shared "
        "prefixes and, without --rate and --concurrency alone, its arrivals",
    )
    group.add_argument(
        "--time-scale",
        type=float,
        metavar="X",
        help="the trace's times are multiplied: 0.5 is twice as fast (default: 1)",
    )
    group.add_argument(
        "--token-scale",
        type=float,
        metavar="X",
        help="the trace's lengths are multiplied (default: 1)",
    )
    group.add_argument(
        "--trace-block-tokens",
        type=int,
        metavar="N",
        help="tokens that a hash id stands for (default: 512)",
    )
    group.add_argument(
        "--context-tokens",
        type=int,
        metavar="N",
        help="longest prompt and answer (default: what the endpoint says)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of lengths, arrivals and prompts; a server's prefix cache knows the "
        "prompts of a seed it has seen (default: 0)",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="TTFT of a good answer")
    group.add_argument("--slo-itl-ms", type=float, metavar="MS", help="ITL of a good answer")
    group.add_argument(
        "--slo-itl-percent",
        type=float,
        metavar="X",
        default=99.0,
        help="percent of an answer's gaps that are to keep it (default: 99)",
    )
    group.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="TPOT of a good answer")
    group.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="E2E of a good answer")
    group.add_argument(
        "--class-bounds",
        metavar="SHORT,MEDIUM",
        help="prompts below these numbers of tokens are short, medium; others long "
        "(default: 512,4096)",
    )
    group.add_argument("--json", metavar="FILE", help="write the figures and each request")
    group.add_argument("--plot", metavar="FILE", help="write a picture: .png, .svg or .pdf")
    group.add_argument(
        "--self-test", action="store_true", help="measure what this client itself costs, and end"
    )
