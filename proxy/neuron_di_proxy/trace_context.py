"""Which trace a request belongs to: W3C Trace Context's `traceparent`, read and written.

    00-<trace id, 32 hex digits>-<id of the span above, 16 hex digits>-<flags, 2 hex digits>

A header that is not valid is as good as none, as the standard has it: no request fails for it.
"""

import random
import re
from dataclasses import dataclass, replace

SAMPLED = 1
_FLAGS_KNOWN = 3  # sampled, and "the trace id is random"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_HEADER_CHARS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A span's place in a trace; what runs below it is given `header()`.

    `span_id` is empty where no span is above: at the root of a trace of our own.
    """

    trace_id: str
    span_id: str
    flags: int
    parent_id: str = ""

    @property
    def is_sampled(self) -> bool:
        """Whether the trace is to be kept, as its beginning decided."""
        return bool(self.flags & SAMPLED)

    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def below(self) -> "TraceContext":
        """A new span's, under this one."""
        return replace(self, span_id=new_span_id(), parent_id=self.span_id)


def read_traceparent(header: str | None) -> TraceContext | None:
    """The client's span; None where the header is not there, or not valid."""
    if header is None or len(header) > _HEADER_CHARS_MAX:
        return None
    found = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Later versions may say more behind the flags; this one may not.
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & _FLAGS_KNOWN)


def new_trace() -> TraceContext:
    """The root of a trace that begins here."""
    trace_id = f"{random.getrandbits(128) or 1:032x}"
    return TraceContext(trace_id=trace_id, span_id="", flags=_FLAGS_KNOWN)


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"
