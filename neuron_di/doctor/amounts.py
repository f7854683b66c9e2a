"""Numbers as a person reads them."""


def in_bytes(num_bytes: int) -> str:
    """In the largest binary unit of which there is one: 512 MiB, 1.5 GiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            number = num_bytes / (1 << power)
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{num_bytes} bytes"


def counted(num: int, noun: str) -> str:
    """With the noun's plural where it is not one: 1 core, 2 cores."""
    return f"{num:,} {noun}" + "s" * (num != 1)
