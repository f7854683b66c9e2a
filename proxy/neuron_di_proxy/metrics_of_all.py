"""One scrape of a proxy that is several processes, whichever of them is asked."""

from collections.abc import Mapping


def join_metrics(texts: Mapping[int, bytes]) -> bytes:
    """The metrics of all processes, by their index, in Prometheus' text format as each wrote it.

    Counters and histograms are summed. A gauge is kept once per process, with the label
    `process`: the sum of what every process says of the same worker would mean nothing.
    """
    comments: dict[str, list[str]] = {}  # by family, in the order they came first
    series: dict[str, dict[str, float]] = {}
    for index, text in texts.items():
        family, is_gauge = "", False
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                series.setdefault(family, {})
            if line.startswith("#"):
                is_gauge = line.endswith(" gauge")
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
                continue
            name, _, value = line.rpartition(" ")
            if is_gauge:
                name = _labelled(name, index)
            values = series[family]
            values[name] = values.get(name, 0.0) + float(value)
    lines: list[str] = []
    for family, values in series.items():
        lines += comments[family]
        lines += [f"{name} {value!r}" for name, value in values.items()]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(name: str, index: int) -> str:
    label = f'process="{index}"'
    return f"{name[:-1]},{label}}}" if name.endswith("}") else f"{name}{{{label}}}"
