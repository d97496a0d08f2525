"""Computes the recording of a dry run at a size that was not traced from two that were, one allocation at a time.

The same code at two sizes makes the same allocations in the same order; only their bytes differ. Each grows in one of a few
ways, and two traces that differ in pixels and in images determine which:

    constant      pixels      images      images * pixels      images * (a + b * pixels)     text and image in one sequence

One image takes another code path than several (what is copied for two is a view for one), so sizes with one image need two
runs of one image, and sizes with several need two runs of several.

Phase memory, allocators and corrections work on the resulting recording as on any other, so the peak may be at another
allocation. It has no FLOPs: two traces do not separate the linear terms from attention's quadratic one. ``pixels`` may be any
measure of size that tensor sizes are linear in (tokens, pixels of all frames).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphrun.errors import InputError
from graphrun.profile.recording import Call, Mark, Recording

# Sizes are multiples of 512 bytes, so they may deviate from a growth factor by as much.
ROUND_BYTES = 512


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run's output: ``images`` images of ``pixels`` pixels each."""

    pixels: int
    images: int = 1


@dataclass(frozen=True, slots=True)
class Range:
    """Two dry runs of one graph, from which others are extrapolated. Raises InputError if they did not take the same code
    path."""

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
        """The recording at ``size``. Raises InputError for a number of images that the two runs do not determine."""
        if size.images != self.small.images and (self.small.images == self.large.images or 1 in (size.images, self.small.images)):
            raise InputError(f"{size.images} images cannot be told from dry runs of {self.small.images} and {self.large.images}")
        extrapolated: dict[int, Call] = {}
        items: list[tuple[int, int] | Mark] = []
        for small, large in self._pairs():
            if not isinstance(small, Mark):
                items.append((small[0], self._bytes(small[1], _nbytes(large), size)))
            elif small.call is None or not isinstance(large, Mark) or large.call is None:
                items.append(small)
            else:
                if id(small.call) not in extrapolated:
                    extrapolated[id(small.call)] = self._call(small.call, large.call, size)
                items.append(replace(small, call=extrapolated[id(small.call)]))
        return Recording(items, dict(self.small_recording.values))

    def _pairs(self) -> Iterator[tuple[tuple[int, int] | Mark, tuple[int, int] | Mark]]:
        small, large = self.small_recording.items, self.large_recording.items
        if len(small) != len(large) or not all(map(_same_step, small, large)):
            raise InputError(
                "the two dry runs took different paths through the pipeline: sizes between them need traces of their own"
            )
        return zip(small, large, strict=True)

    def _call(self, small: Call, large: Call, size: Size) -> Call:
        events = tuple(
            (self._bytes(a[0], b[0], size) if a[1] < 0 else a[0], self._bytes(a[1], b[1], size))
            for a, b in zip(small.events, large.events, strict=True)
        )
        now = peak = 0
        live: dict[int, int] = {}
        for key, nbytes in events:
            if nbytes >= 0:
                now += nbytes or -live[key]
                live[key] = nbytes
                peak = max(peak, now)
        inputs = self._bytes(small.input_bytes, large.input_bytes, size)
        return replace(small, events=events, peak_bytes=peak, input_bytes=inputs, flops=(), products=(), spans=())

    def _bytes(self, small: int, large: int, size: Size) -> int:
        """Bytes at ``size`` of an allocation of ``small`` and ``large`` bytes in the two runs; scratch is negative."""
        if small == large:
            return small
        pixels, images = self.large.pixels / self.small.pixels, self.large.images / self.small.images
        p, n = size.pixels / self.small.pixels, size.images / self.small.images
        for factor, at in ((pixels * images, p * n), (pixels, p), (images, n)):
            if abs(abs(small) * factor - abs(large)) <= ROUND_BYTES * factor:
                return _rounded(small * at)
        slope = (large / images - small) / (pixels - 1)
        return _rounded(n * (small + slope * (p - 1)))


def _same_step(small: tuple[int, int] | Mark, large: tuple[int, int] | Mark) -> bool:
    if not isinstance(small, Mark) or not isinstance(large, Mark):
        return type(small) is type(large) and _sign(_nbytes(small)) == _sign(_nbytes(large))
    if small.kind != large.kind or small.name != large.name or (small.call is None) != (large.call is None):
        return False
    if small.call is None or large.call is None or small.call is large.call:
        return True
    a, b = small.call, large.call
    same = a.entry == b.entry and [path for path, _ in a.flops] == [path for path, _ in b.flops] and len(a.events) == len(b.events)
    return same and all(x[1] * y[1] > 0 or x[1] == y[1] == 0 for x, y in zip(a.events, b.events, strict=True))


def _nbytes(item: tuple[int, int] | Mark) -> int:
    return 0 if isinstance(item, Mark) else item[1]


def _sign(nbytes: int) -> int:
    return (nbytes > 0) - (nbytes < 0)


def _rounded(nbytes: float) -> int:
    """The next multiple of 512 that is at least as large in absolute value, with the same sign."""
    steps = -int(-abs(nbytes) // ROUND_BYTES)
    return ROUND_BYTES * (steps if nbytes > 0 else -steps)
