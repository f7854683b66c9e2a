"""README and docs/ say what there is: links, flags, defaults, log events, messages."""

import re
from functools import cache
from pathlib import Path

import pytest
from tutorial_kit import links_of

from neuron_di.config import ServeOptions, WorkerOptions
from neuron_di.config.option import OptionSpec, specs_of
from neuron_di.config.options import OPTION_SETS
from neuron_di.config.value import size_in_words

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "examples/models", "examples/xpyd")),
]
# Of commands and programs that have no option sets: bench, conformance, drain, etcd, pip, ….
WITH_OTHER_FLAGS = {"bench.md", "conformance.md", "cuda.md", "etcd.md"}
OTHER_FLAGS = {"--config", "--extra-index-url", "--force", "--simulate", "--timeout-s", "--url"}
OTHER_FLAGS |= {"--first-hour", "--help", "--json", "--operator"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@cache
def source() -> str:
    """All code that logs and complains; a text that is split over lines is one line here."""
    files = [path for name in ("neuron_di", "proxy") for path in (ROOT / name).rglob("*.py")]
    files += (ROOT / "runtime_bindings").rglob("*.[ch]")
    files += (ROOT / "runtime_bindings").rglob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return re.sub(r'"\s+f?"', "", text)


@cache
def specs() -> dict[str, OptionSpec]:
    every = (*OPTION_SETS, WorkerOptions, ServeOptions)  # a proxy's port is the one that is meant
    return {spec.flag: spec for each in every for spec in specs_of(each).values()}


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert f"\n## {title}\n" in text
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pages
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links_of(page)


@cache
def file_names() -> set[str]:
    folders = ("neuron_di", "proxy", "runtime_bindings", "tests", "examples", "benchmarks")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}


@pages
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    """Those of another repository, and parts of names such as `*_engine.py`, are not meant."""
    text = page.read_text(encoding="utf-8").replace("disagg_prefill_proxy_server.py", "")
    for name in re.findall(r"`(?:[\w./…-]*/)?(\w+\.(?:py|c|sh|ptx))`", text):
        assert name in file_names(), name


@pages
def test_the_flags_of_a_page_are_flags_of_ours(page: Path) -> None:
    if page.name in WITH_OTHER_FLAGS or page.parent.name in ("benchmarks", "models", "xpyd"):
        return
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
    negated = {flag.replace("--", "--no-", 1) for flag in specs()}
    assert named - specs().keys() - negated - OTHER_FLAGS == set()


@pages
def test_a_default_that_a_page_says_is_the_default(page: Path) -> None:
    """As in `--stall-timeout-s` (15 s), `--reserve-tokens` (128), or a fifth of one."""
    said = re.findall(
        r"(fifth of )?`(--[\w-]+)`(?: \(| )(\d[\d.]*)(?: s)?(?:[,)]| \|)",
        page.read_text(encoding="utf-8"),
    )
    for is_part, flag, number in said:
        default = specs()[flag].default if flag in specs() else None
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert default / (5 if is_part else 1) == float(number), flag


def test_the_table_of_flags_has_their_defaults() -> None:
    rows = re.findall(
        r"^\| (`--.+?`) \| (.+?) \| .+$", section("operations.md", "Flags for tuning"), re.MULTILINE
    )
    assert len(rows) > 20
    for cell, said in rows:
        flags = re.findall(r"--[\w-]+", cell)
        values = said.split(", ") if len(flags) > 1 else [said]
        assert len(values) == len(flags), cell
        for flag, value in zip(flags, values, strict=True):
            assert value in _defaults(specs()[flag]), flag


def _defaults(spec: OptionSpec) -> set[str]:
    """How a table may say it."""
    default = spec.default
    if spec.default_text:
        words = spec.default_text.replace(" of the decode workers", "")
        return {spec.default_text, words, "any" if spec.key == "core" else ""}
    if isinstance(default, bool):
        return {"on" if default else "off"}
    if isinstance(default, float):
        return {f"{default:g}", f"{default:g} s"}
    return (
        {str(default), re.sub(r"(?<=\d)(?=[KMG]iB)", " ", size_in_words(default))} - {""}
        if isinstance(default, int)
        else {str(default)}
    )


def test_events_of_the_operators_table_are_logged() -> None:
    table = section("operations.md", "What to watch").partition("| log event |")[2]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert len(rows) > 10
    for event in re.findall(r"`(\w+)`", " ".join(rows)):
        code = '"worker_" + state' if event == "worker_frozen" else f'"{event}"'
        assert code in source(), event


@pytest.mark.parametrize(
    ("page", "title"),
    [("neuron.md", "What it says, and what to do"), ("nixl.md", "Neuron devices")],
)
def test_messages_that_a_page_explains_are_said(page: str, title: str) -> None:
    quoted = re.findall(r"^\| (`.+?`) \|", section(page, title), re.MULTILINE)
    assert len(quoted) > 5
    for message in re.findall(r"`(.+?)`", " ".join(quoted)):
        # What differs from case to case is a dot, a capital or a name; words between must be there.
        parts = re.split(r"…|:|\b[NM]\b|\b[A-Z_]{8,}\S*|/\S+|\w+_\w+|--\S+", message)
        for part in (each.strip(" .:()") for each in parts):
            assert part in source(), (message, part)
