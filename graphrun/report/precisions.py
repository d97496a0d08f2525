"""What lower precisions do to pictures of the small trained pipeline, for screens that propose one
(docs/precision.md)."""

from __future__ import annotations

from collections.abc import Iterable

# Of 200 pictures each with one object and with two, how many are as asked; PSNR in dB beside the
# same prompts and seeds in bf16. Measured by benchmarks/precision.py on graphs/shapes.
PLAIN = (0.98, 0.96)
MEASURED = {"fp8": (0.975, 0.96, 50.5), "int8": (0.98, 0.96, 55.5), "nf4": (0.985, 0.97, 40.3)}


def measured(permissions: Iterable[str]) -> list[str]:
    """A line with the figures of those of ``permissions`` that are precisions; none where none
    is."""
    found = [(name, *MEASURED[name]) for name in sorted(set(permissions)) if name in MEASURED]
    if not found:
        return []
    rows = [f"in {name} {one:.1%} and {two:.1%}, PSNR {psnr} dB" for name, one, two, psnr in found]
    plain = "{:.1%} of pictures with one object and {:.1%} with two are as asked in bf16".format(
        *PLAIN
    )
    return [
        f" of the small pipeline of graphs/shapes, no promise for this model: {'; '.join((plain, *rows))}"
    ]
