"""What became of a request, beside the answer it would have got without any fault."""

from dataclasses import dataclass

from .client import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Each is a finding of its own; a good answer is completed, equal, and nothing else."""

    is_completed: bool  # it says so: a finish reason, and [DONE]
    is_equal: bool  # completed, and equal to the undisturbed answer, text and numbers
    is_wrong: bool  # it holds what the undisturbed one does not, or ended as it must not
    is_misnumbered: bool  # a token is missing or doubled
    is_stuck: bool
    has_left: bool  # the client hung up
    num_continued: int  # by its own word
    error_code: str  # "" without an error
    words: str  # why it is wrong


def judge(stream: Stream, expected: Stream) -> Verdict:
    """Compare a disturbed answer with the undisturbed one."""
    flaws = list(stream.flaws)
    is_completed = stream.end == "done"
    if stream.end == "silent":
        flaws.append("it ended without an error and without [DONE]")
    if is_completed and stream.num_finishes != 1:
        flaws.append(f"{stream.num_finishes} finish reasons")
    if stream.end == "error" and stream.num_finishes:
        flaws.append("a finish reason and an error")
    num_continued, grade = stream.continued()
    if num_continued and grade != "exact":  # on a CPU it always is
        flaws.append(f"continued, but {grade}")
    if stream.end == "error" and not stream.error_code:
        flaws.append("an error without a code")
    is_misnumbered, words = _compare(stream, expected, is_completed=is_completed)
    if words:
        flaws.append(words)
    return Verdict(
        is_completed=is_completed,
        is_equal=is_completed and not flaws,
        is_wrong=bool(flaws) and not is_misnumbered,
        is_misnumbered=is_misnumbered,
        is_stuck=stream.end == "stuck",
        has_left=stream.end == "left",
        num_continued=num_continued,
        error_code="connection_cut" if stream.end == "cut" else stream.error_code,
        words="; ".join(flaws),
    )


def _compare(stream: Stream, expected: Stream, *, is_completed: bool) -> tuple[bool, str]:
    """Whether an index is missing or doubled, and what else differs."""
    got, due = stream.tokens, expected.tokens
    if stream.end in ("left", "cut"):  # it may have been asked for more
        num = min(len(got), len(due))
        if got[:num] != due[:num]:
            return _is_shifted(got, due), f"its {len(got)} tokens are not how the answer begins"
        if stream.logprobs[:num] != expected.logprobs[:num]:
            return False, "log probabilities differ"
        # Of more tokens a character may be whole that was cut there.
        if len(got) <= num and not expected.text.startswith(stream.text):
            return False, "its text is not how the answer begins"
        return False, ""
    num = len(got)
    if is_completed and got != due:
        return _is_shifted(got, due), f"{num} tokens differ from the {len(due)} that were due"
    if got != due[:num]:
        return _is_shifted(got, due), f"its {num} tokens are not how the answer begins"
    if stream.logprobs != expected.logprobs[:num]:
        return False, "log probabilities differ"
    if is_completed and stream.finish_reason != expected.finish_reason:
        return False, f"ended by {stream.finish_reason}, not by {expected.finish_reason}"
    if is_completed and stream.text != expected.text:
        return False, "the text differs"
    if is_completed and stream.usage != expected.usage:
        return False, f"it counts {stream.usage} tokens, not {expected.usage}"
    if not expected.text.startswith(stream.text):
        return False, "its text is not how the answer begins"
    return False, ""


def _is_shifted(got: list[str], due: list[str]) -> bool:
    """True when a token was left out or came twice: the rest fits, moved by some places."""
    pairs = enumerate(zip(got, due, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(got), len(due)))
    rest = got[first:]
    if not rest:
        return len(got) < len(due)  # it says it is complete, and its end is missing
    num = min(len(rest), 3)
    starts = [s for s in range(len(due)) if s != first]
    return any(due[s : s + num] == rest[:num] for s in starts if len(due) - s >= num)
