"""Dry runs at sizes that were not traced, from two that were: every allocation by itself, so that peaks may fall elsewhere.

The same code at two sizes makes the same allocations in the same order; only their bytes differ. Each grows in one of few ways,
and two traces that differ in pixels by a factor and in images by another tell which:

    constant      pixels      images      images * pixels      images * (a + b * pixels)     texts and picture in one sequence

One picture takes another path than several (what would be copied for two is a view for one), so a range of one picture comes from
two runs of one, and a range of several from two runs of several.

Windows, allocators and corrections work on the resulting tape as on any other. It has no FLOPs: two traces do not tell what is
linear from attention's square. ``pixels`` may be any measure of size that tensors are linear in (tokens, pixels of all frames).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphrun.errors import InputError
from graphrun.profile.recording import Call, Mark, Recording

# Sizes are multiples of 512 bytes: what is near a law within that follows it.
ROUND_BYTES = 512


@dataclass(frozen=True, slots=True)
class Size:
    """What a run makes: ``images`` pictures of ``pixels`` pixels each."""

    pixels: int
    images: int = 1


@dataclass(frozen=True, slots=True)
class Range:
    """Two dry runs of one graph, and all sizes that they stand for. Raises InputError where they did not take the same path."""

    small: Size
    large: Size
    small_recording: Recording
    large_recording: Recording

    def __post_init__(self) -> None:
        if self.small.pixels >= self.large.pixels:
            raise InputError("the second of two dry runs must have more pixels than the first")
        for _ in self._pairs():
            pass

    def recording(self, size: Size) -> Recording:
        """The dry run at ``size``. Raises InputError for another number of pictures where both runs made the same number."""
        if size.images != self.small.images and (self.small.images == self.large.images or 1 in (size.images, self.small.images)):
            raise InputError(f"{size.images} images cannot be told from dry runs of {self.small.images} and {self.large.images}")
        made: dict[int, Call] = {}
        items: list[tuple[int, int] | Mark] = []
        for here, there in self._pairs():
            if not isinstance(here, Mark):
                items.append((here[0], self._bytes(here[1], _nbytes(there), size)))
            elif here.call is None or not isinstance(there, Mark) or there.call is None:
                items.append(here)
            else:
                if id(here.call) not in made:
                    made[id(here.call)] = self._call(here.call, there.call, size)
                items.append(replace(here, call=made[id(here.call)]))
        return Recording(items, dict(self.small_recording.values))

    def _pairs(self) -> Iterator[tuple[tuple[int, int] | Mark, tuple[int, int] | Mark]]:
        here, there = self.small_recording.items, self.large_recording.items
        if len(here) != len(there) or not all(map(_alike, here, there)):
            raise InputError(
                "the two dry runs took different paths through the pipeline: sizes between them need traces of their own"
            )
        return zip(here, there, strict=True)

    def _call(self, here: Call, there: Call, size: Size) -> Call:
        events = tuple(
            (self._bytes(a[0], b[0], size) if a[1] < 0 else a[0], self._bytes(a[1], b[1], size))
            for a, b in zip(here.events, there.events, strict=True)
        )
        now = peak = 0
        live: dict[int, int] = {}
        for key, nbytes in events:
            if nbytes >= 0:
                now += nbytes or -live[key]
                live[key] = nbytes
                peak = max(peak, now)
        inputs = self._bytes(here.input_bytes, there.input_bytes, size)
        return replace(here, events=events, peak_bytes=peak, input_bytes=inputs, flops=(), products=(), spans=())

    def _bytes(self, here: int, there: int, size: Size) -> int:
        """Bytes at ``size`` of what takes ``here`` and ``there`` in the two runs; scratch is negative."""
        if here == there:
            return here
        pixels, images = self.large.pixels / self.small.pixels, self.large.images / self.small.images
        p, n = size.pixels / self.small.pixels, size.images / self.small.images
        for law, at in ((pixels * images, p * n), (pixels, p), (images, n)):
            if abs(abs(here) * law - abs(there)) <= ROUND_BYTES * law:
                return _rounded(here * at)
        slope = (there / images - here) / (pixels - 1)
        return _rounded(n * (here + slope * (p - 1)))


def _alike(here: tuple[int, int] | Mark, there: tuple[int, int] | Mark) -> bool:
    if not isinstance(here, Mark) or not isinstance(there, Mark):
        return type(here) is type(there) and _sign(_nbytes(here)) == _sign(_nbytes(there))
    if here.kind != there.kind or here.name != there.name or (here.call is None) != (there.call is None):
        return False
    if here.call is None or there.call is None or here.call is there.call:
        return True
    a, b = here.call, there.call
    same = a.entry == b.entry and [path for path, _ in a.flops] == [path for path, _ in b.flops] and len(a.events) == len(b.events)
    return same and all(x[1] * y[1] > 0 or x[1] == y[1] == 0 for x, y in zip(a.events, b.events, strict=True))


def _nbytes(item: tuple[int, int] | Mark) -> int:
    return 0 if isinstance(item, Mark) else item[1]


def _sign(nbytes: int) -> int:
    return (nbytes > 0) - (nbytes < 0)


def _rounded(nbytes: float) -> int:
    """A multiple of 512 that is as large or larger (in scratch: as negative)."""
    steps = -int(-abs(nbytes) // ROUND_BYTES)
    return ROUND_BYTES * (steps if nbytes > 0 else -steps)
