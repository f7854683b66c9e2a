"""What nvidia-smi says, where there is one. Asks only, and changes nothing."""

import shutil
import subprocess

TIMEOUT_S = 20.0
FIELDS = (
    *("name", "driver_version", "compute_cap", "memory.total", "memory.used", "clocks.sm"),
    *("clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw", "compute_mode"),
    "mig.mode.current",
)


def query(what: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """One dict per GPU or process. Empty where nvidia-smi is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def processes() -> list[dict[str, str]]:
    """Who computes on the GPUs. A container may see none of the others'."""
    return query("compute-apps", ("pid", "used_memory"))


def gpu_words() -> str:
    """The GPUs' state in a line, empty without nvidia-smi."""
    words = [
        f"{gpu['name']}: SM {gpu['clocks.sm']} of {gpu['clocks.max.sm']}, memory "
        f"{gpu['clocks.mem']}, {gpu['temperature.gpu']} °C, {gpu['memory.used']} used"
        for gpu in query("gpu", FIELDS)
    ]
    if not words:
        return ""
    others = processes()
    return f"Before: {'; '.join(words)}; processes on it: {len(others) or 'none'}."
