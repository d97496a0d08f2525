"""The effect of lower precisions on pictures of the small trained pipeline. Screens that suggest a
lower precision show it (docs/precision.md)."""

from __future__ import annotations

from collections.abc import Iterable

# The share of correct pictures among 200 with one object and 200 with two; then PSNR in dB against
# the same prompts and seeds in bf16. Measured by benchmarks/precision.py on graphs/shapes.
PLAIN = (0.98, 0.96)
MEASURED = {"fp8": (0.975, 0.96, 50.5), "int8": (0.98, 0.96, 55.5), "nf4": (0.985, 0.97, 40.3)}


def precision_lines(permissions: Iterable[str]) -> list[str]:
    """Return a line with the figures of the precisions among ``permissions``, if any."""
    figures = [(name, *MEASURED[name]) for name in sorted(set(permissions)) if name in MEASURED]
    if not figures:
        return []
    rows = [
        f"in {name} {one_object:.1%} and {two_objects:.1%}, PSNR {psnr} dB"
        for name, one_object, two_objects, psnr in figures
    ]
    plain = "in bf16 {:.1%} and {:.1%}".format(*PLAIN)
    return [
        " correct pictures of graphrun's small FLUX with one and with two objects (no promise for "
        f"this model): {'; '.join((plain, *rows))}"
    ]
