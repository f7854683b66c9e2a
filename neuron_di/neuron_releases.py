"""Releases of AWS's Neuron SDK: which versions belong together, and which are known not to.

Data. Source: AWS's published list of the packages of each release, and the known issues in its
release notes. Versions are compared by their first two numbers, which is how the parts count.
Imports nothing of a device's, so that what has no torch may ask: a proxy's container.
"""

import re
from dataclasses import dataclass

AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"  # where pip finds the packages
# NxD Inference before this one has KV as long as the context, and no positions behind it for rows
# without a request, which apply_seq_ids_mask needs.
INFERENCE_MIN, INFERENCE_MIN_SDK = (0, 7), "2.27"
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Release:
    """One release. Empty where it has no such package for these devices."""

    sdk: str
    runtime: str  # aws-neuronx-runtime-lib, and its collectives
    driver: str  # aws-neuronx-dkms
    compiler: str  # neuronx-cc
    torch: str  # torch-neuronx: behind the version of torch, as in 2.9.0.2.13.26312
    distributed: str  # neuronx-distributed
    inference: str  # neuronx-distributed-inference


RELEASES = (
    Release("2.33", "2.35", "2.31", "2.28", "2.15", "", ""),
    Release("2.32", "2.34", "2.30", "2.27", "", "", ""),
    Release("2.31", "2.33", "2.29", "2.26", "2.15", "0.19", "0.10"),
    Release("2.30", "2.32", "2.28", "2.25", "2.14", "0.19", "0.10"),
    Release("2.29", "2.31", "2.27", "2.24", "2.13", "0.18", "0.9"),
    Release("2.28", "2.30", "2.26", "2.23", "2.12", "0.17", "0.8"),
    Release("2.27", "2.29", "2.25", "2.22", "2.11", "0.16", "0.7"),
    Release("2.26", "2.28", "2.24", "2.21", "2.10", "0.15", "0.6"),
    Release("2.25", "2.27", "2.23", "2.20", "2.9", "0.14", "0.5"),
    Release("2.24", "2.26", "2.22", "2.19", "2.8", "0.13", "0.4"),
)
_TORCH_PARTS = slice(3, 5)  # behind torch's own three numbers


def numbers_of(version: str) -> tuple[int, ...]:
    """(2, 32, 31, 0) of "2.32.31.0", and of "2.32.31.0+abc"; () where it begins with none."""
    found = _NUMBERS.match(version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def short(version: str) -> str:
    """The first two numbers: "2.32"."""
    return ".".join(str(number) for number in numbers_of(version)[:2])


def sdks_of(part: str, version: str) -> tuple[str, ...]:
    """The releases that have this version of a part, the newest first; () where none of ours does.

    `part` is a field of Release.
    """
    numbers = numbers_of(version)
    of_part = numbers[_TORCH_PARTS] if part == "torch" else numbers[:2]
    wanted = ".".join(str(number) for number in of_part)
    return tuple(row.sdk for row in RELEASES if wanted and getattr(row, part) == wanted)


def why_not_together(runtime: str, driver: str, family: str) -> str | None:
    """Why a runtime does not start with a driver, as AWS's release notes say; None where they say
    nothing. `family` is an instance's: "trn2"."""
    of_runtime, of_driver = numbers_of(runtime)[:2], numbers_of(driver)[:2]
    if of_driver >= (2, 29) and of_runtime < (2, 33):
        return "driver 2.29 and later need a runtime 2.33 or later"
    if of_runtime == (2, 32) and of_driver <= (2, 26):
        return "runtime 2.32 needs a driver later than 2.26"
    if family.startswith("trn2") and of_runtime >= (2, 26) and of_driver < (2, 22):
        return "on Trn2 a runtime 2.26 and later needs a driver 2.22 or later"
    return None


def overflows_at_4_gib(runtime: str) -> bool:
    """Whether tensors of 4 GiB and more overflow in this runtime: before 2.30."""
    return numbers_of(runtime)[:2] < (2, 30)
