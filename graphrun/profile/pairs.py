"""Phases whose calls come in pairs: guidance that calls a denoiser twice a step.

The second call of a pair needs nothing from the first if no other code reads the first prediction
before the second call. A dry run does not record what other code reads, so what it allocates
decides: an operator that reads a prediction and makes another tensor of it allocates as much.

    between calls      first - second           second - first of the next step
    allocated          at most a time step      guidance, the next latents

A run with a wrong guess gives the same outputs, and takes longer: the first prediction is then
transferred when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphrun.profile.recording import Call, MemoryEvent, Recording, StageEnd

FEWEST_PAIRS = 2  # a single pair may be two prompts of an encoder


def spans_with_pairs(
    recording: Recording, spans: Sequence[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return those of ``spans`` (ranges of ``recording.entries()``) whose calls come in pairs."""
    calls, allocated_bytes = list[Call](), list[list[int]]()
    is_open = False
    for item in recording.items:
        if isinstance(item, Call):
            calls.append(item)
            allocated_bytes.append([])
            is_open = True
        elif isinstance(item, StageEnd):
            is_open = False
        elif isinstance(item, MemoryEvent) and item.nbytes and is_open:
            allocated_bytes[-1].append(item.nbytes)
    reads = [
        max(_beyond_results(call, nbytes), default=0) > call.output_bytes / 2
        for call, nbytes in zip(calls, allocated_bytes, strict=True)
    ]
    return {
        (begin, end)
        for begin, end in spans
        if end - begin >= 2 * FEWEST_PAIRS
        and (end - begin) % 2 == 0
        and len({(call.component, call.entry) for call in calls[begin:end]}) == 1
        # a tensor that the component keeps may be from the first call
        and not any(call.persistent_keys for call in calls[begin:end])
        and not any(reads[begin:end:2])
        and all(reads[begin + 1 : end : 2])
    }


def _beyond_results(call: Call, allocated_bytes: Sequence[int]) -> list[int]:
    """Return ``allocated_bytes`` after ``call`` without its results, which are recorded again."""
    sizes = {event.key: event.nbytes for event in call.events if event.nbytes}
    other_bytes = list(allocated_bytes)
    for key in call.results:
        if sizes.get(key) in other_bytes:
            other_bytes.remove(sizes[key])
    return other_bytes
