"""One scrape of a proxy that is several processes, whichever of them is asked."""

from collections.abc import Mapping


def join_metrics(texts: Mapping[int, bytes]) -> bytes:
    """The metrics of all processes, by their index, in Prometheus' text format as each wrote it.

    Each series is kept once per process, with the label `process`. A sum would fall where one of
    them was started again or did not answer, and Prometheus take the rest for new.
    """
    comments: dict[str, list[str]] = {}  # by family, in the order they came first
    series: dict[str, list[str]] = {}
    for index, text in texts.items():
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            if line.startswith("#"):
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            else:
                name, _, value = line.rpartition(" ")
                series.setdefault(family, []).append(f"{_labelled(name, index)} {value}")
    lines = [line for family, about in comments.items() for line in about + series.get(family, [])]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(name: str, index: int) -> str:
    label = f'process="{index}"'
    return f"{name[:-1]},{label}}}" if name.endswith("}") else f"{name}{{{label}}}"
