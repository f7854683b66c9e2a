"""What a shared library exports, read from its file: nothing is loaded, no program is needed.

The layout is that of the ELF specification, for 64 bits and little endian: the section of dynamic
symbols, and GNU's sections with the symbols' versions.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DEFINITION = struct.Struct("<HHHHIII")
_DYNSYM, _VERSIONS, _DEFINITIONS = 11, 0x6FFFFFFF, 0x6FFFFFFD
_FUNCTIONS = (2, 10)  # the second is chosen by the loader, for the processor
_UNDEFINED = 0
_HIDDEN = 0x8000
_MAGIC = b"\x7fELF\x02\x01"


class NoElf(Exception):
    """Raised when a file is no shared library of 64 bits, or is damaged."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    first: int  # sh_info


def exported_functions(path: Path) -> dict[str, str]:
    """By name, the version that each has ("NRT_2.0.0"; empty where none). NoElf, OSError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _functions_in(data)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise NoElf(f"{path.name} is no shared library that can be read: {error}") from None


def _functions_in(data: mmap.mmap) -> dict[str, str]:
    header = _HEADER.unpack_from(data)
    if not header[0].startswith(_MAGIC):
        raise ValueError("not of 64 bits, little endian")
    table, entry_bytes, count = header[6], header[11], header[12]
    sections = [_section(data, table + number * entry_bytes) for number in range(count)]
    symbols = next((each for each in sections if each.kind == _DYNSYM), None)
    if symbols is None:
        raise ValueError("no dynamic symbols")
    names = sections[symbols.link]
    versions = next((each for each in sections if each.kind == _VERSIONS), None)
    definitions = next((each for each in sections if each.kind == _DEFINITIONS), None)
    labels = {} if definitions is None else _labels(data, definitions, sections)
    found = {}
    for number in range(symbols.size // _SYMBOL.size):
        row = _SYMBOL.unpack_from(data, symbols.offset + number * _SYMBOL.size)
        name_at, info, section = row[0], row[1], row[3]
        if info & 0xF in _FUNCTIONS and info >> 4 and section != _UNDEFINED:
            index = 0
            if versions is not None:
                (index,) = struct.unpack_from("<H", data, versions.offset + 2 * number)
            found[_text(data, names.offset + name_at)] = labels.get(index & ~_HIDDEN, "")
    return found


def _section(data: mmap.mmap, at: int) -> _Section:
    row = _SECTION.unpack_from(data, at)
    return _Section(kind=row[1], offset=row[4], size=row[5], link=row[6], first=row[7])


def _labels(data: mmap.mmap, definitions: _Section, sections: list[_Section]) -> dict[int, str]:
    """The versions that the library defines, by their index, but for the base, its own name."""
    names, found, at = sections[definitions.link], {}, definitions.offset
    for _ in range(definitions.first):
        row = _DEFINITION.unpack_from(data, at)
        is_base, index, first_name, next_one = row[1] & 1, row[2], row[5], row[6]
        (name_at,) = struct.unpack_from("<I", data, at + first_name)
        if not is_base:
            found[index] = _text(data, names.offset + name_at)
        if not next_one:
            break
        at += next_one
    return found


def _text(data: mmap.mmap, at: int) -> str:
    end = data.find(b"\0", at)
    if end < 0:
        raise ValueError("a name without an end")
    return data[at:end].decode()
