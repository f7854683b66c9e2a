"""The spans of one choice, drawn from its receipt when it is over: OTLP's JSON.

    |------------------------- answer -------------------------|
    |-- queue --|                                              |
                |- prefill -|                                  |
                            |- transfer -|                     |
                                              |--- decode -----|

Nothing is measured for this. Durations are the receipt's; the workers' clocks are not compared.
So the places are the proxy's: the prefill ends with the first token (in an answer of several
attempts: so that it all fits before the end), the transfer begins there, and the decoding ends
with the answer. Spans of an answer with several attempts are the last attempt's.
"""

from dataclasses import dataclass
from typing import Any

from neuron_di_proxy.receipts import Receipt
from neuron_di_proxy.trace_context import TraceContext, new_span_id

_SERVER, _INTERNAL = 2, 1  # OTLP's span kinds
_ERROR = 2  # OTLP's status

Span = dict[str, Any]  # as OTLP's JSON has it


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedChoice:
    """What spans are drawn from. `ended_unix_s` is when the receipt was sealed."""

    trace: TraceContext
    receipt: Receipt
    code: str | None
    tenant: str
    ended_unix_s: float


def spans_of(ended: EndedChoice) -> list[Span]:
    """The choice's own span, then one for each part that is known to have happened."""
    receipt = ended.receipt
    end_s = ended.ended_unix_s
    start_s = end_s - receipt.e2e_s
    accepted_s = start_s + receipt.queued_s
    spans = [_answer_span(ended, start_s)]
    if receipt.queued_s > 0:
        spans.append(_part(ended.trace, "queue", start_s, receipt.queued_s, {}))
    prefill, decode = receipt.prefill, receipt.decode
    decode_s = decode.decode_s if decode is not None else 0.0
    parked_s = end_s - decode_s - receipt.transfer_s
    if receipt.ttft_s is not None and len(receipt.attempts) == 1:
        parked_s = start_s + receipt.ttft_s
    parked_s = min(max(parked_s, accepted_s), end_s)
    if prefill is not None:
        begin_s = max(accepted_s, parked_s - prefill.prefill_s)
        worker = {"neuron_di.worker": prefill.worker_id, "neuron_di.queued_s": prefill.queued_s}
        spans.append(_part(ended.trace, "prefill", begin_s, parked_s - begin_s, worker))
    if receipt.link:
        moved: dict[str, object] = {
            "neuron_di.link": receipt.link,
            "neuron_di.kv_bytes": receipt.kv_bytes,
            "neuron_di.kv_form": receipt.form or "",
        }
        duration_s = min(receipt.transfer_s, end_s - parked_s)
        spans.append(_part(ended.trace, "transfer", parked_s, duration_s, moved))
    if decode is not None:
        begin_s = max(parked_s, end_s - decode_s)
        worker = {"neuron_di.worker": decode.worker_id}
        spans.append(_part(ended.trace, "decode", begin_s, end_s - begin_s, worker))
    return spans


def otlp_document(spans: list[Span], resource: dict[str, object]) -> dict[str, Any]:
    """What a collector takes: an ExportTraceServiceRequest in JSON."""
    scope = {"scope": {"name": "neuron_di_proxy"}, "spans": spans}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}
        ]
    }


def _answer_span(ended: EndedChoice, start_s: float) -> Span:
    receipt, trace = ended.receipt, ended.trace
    attributes: dict[str, object] = {
        "neuron_di.request_id": receipt.request_id,
        "neuron_di.tenant": ended.tenant,
        "neuron_di.attempts": len(receipt.attempts),
        "neuron_di.continued": receipt.continued,
        "gen_ai.usage.input_tokens": receipt.num_prompt,
        "gen_ai.usage.output_tokens": receipt.num_generated,
        "gen_ai.response.finish_reasons": [receipt.finish_reason],
    }
    if receipt.attempt is not None:  # else it may be any name that a client made up
        attributes["gen_ai.request.model"] = receipt.model
    if receipt.ttft_s is not None:
        attributes["neuron_di.ttft_s"] = receipt.ttft_s
    if ended.code is not None:
        attributes["error.type"] = ended.code
    span = _span(trace, "answer", _SERVER, start_s, receipt.e2e_s, attributes)
    span["spanId"] = trace.span_id
    if trace.parent_id:
        span["parentSpanId"] = trace.parent_id
    if ended.code is not None:
        span["status"] = {"code": _ERROR}
    return span


def _part(
    trace: TraceContext, name: str, start_s: float, duration_s: float, attributes: dict[str, object]
) -> Span:
    span = _span(trace, name, _INTERNAL, start_s, duration_s, attributes)
    return span | {"spanId": new_span_id(), "parentSpanId": trace.span_id}


def _span(
    trace: TraceContext,
    name: str,
    kind: int,
    start_s: float,
    duration_s: float,
    attributes: dict[str, object],
) -> Span:
    return {
        "traceId": trace.trace_id,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(round(start_s * 1e9)),
        "endTimeUnixNano": str(round((start_s + duration_s) * 1e9)),
        "attributes": _attributes(attributes),
        "flags": trace.flags,
    }


def _attributes(values: dict[str, object]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value(value)} for key, value in values.items()]


def _any_value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits are a string in protobuf's JSON
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_any_value(each) for each in value]}}
    return {"stringValue": str(value)}
