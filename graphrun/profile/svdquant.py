"""Bytes of SVDQuant checkpoints (W4A4: weights and activations in 4 bits), layer by layer.

Sources: `SVDQW4A4Linear` and `AWQW4A16Linear` in nunchaku/models/linear.py (nunchaku-tech/nunchaku,
commit 3a3cc3d) and diffusers 0.42.1, quantizers/nunchaku/utils.py. Which layers a file has in 4
bits, and which layers share tensors: nunchaku/models/transformers (`transformer_flux_v2.py`,
`transformer_zimage.py`) and nunchaku/models/normalization.py. The tensors of a weight [out in]:

    weights        out * in / 2
    scales         one per group of 64 in 16 bits (int4), one per group of 16 in 8 bits (fp4)
    low rank       [in 32] and [out 32] in 16 bits
    smoothing      [in] twice in 16 bits: as computed with, and before it was merged
    fp4 only       [out] and one number in 16 bits

Layers that read one input (query, key and value; the two inputs of a gated feed-forward) are one
layer in the file, with one [in 32] and one pair of smoothing factors. A single block of FLUX has
its output projection as two layers, with two [out 32] and two biases. Modulation is W4A16: weights
in 4 bits, and a scale and a zero point in 16 bits per group of 64.

FLUX.1-schnell in int4 has 6,747,539,584 bytes of tensors; the published file has 6,747,849,760 with
its header. Nothing here was run.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

RANK = 32  # of the published files whose names have r32
GROUPS = {"svdq-int4": (64, 2), "svdq-fp4": (16, 1)}  # elements per scale, bytes of a scale
MODULATION_GROUP = 64
ELEMENT_BYTES = 2
# Rate of 4-bit products over the rate in int8, as in NVIDIA's data sheets of these cards. With it,
# FLUX.1-dev computes 1.9 times as fast as in nf4 on an RTX 4090. nunchaku states 3.0, with code of
# its own between the layers too, which diffusers' loader does not have.
FOUR_BIT_FACTOR = 2
PADDED_ROWS = 256  # rows of activations are padded to a multiple of it before they are quantized

LayerKind = Literal["own", "shared", "split", "modulation"]
# below a numbered module: layers of repeated blocks, not of embeddings
_IN_BLOCK = re.compile(r"(^|\.)\d+\.")
_PLAIN = "adaLN_modulation"  # Z-Image's modulation stays in 16 bits
_MODULATION = ("norm.linear", "norm1.linear", "norm1_context.linear")
_SHARED = ("to_k", "to_v", "add_k_proj", "add_v_proj", "w3")
_SPLIT = "proj_out"


def layer_tensors(
    outputs: int, inputs: int, precision: str, kind: LayerKind = "own"
) -> tuple[int, ...]:
    """Return the bytes of each tensor of a weight [outputs inputs] in an SVDQuant ``precision``.

    ``kind``: ``shared`` uses the input's tensors of another layer, ``split`` is two layers.
    """
    weight_bytes = outputs * inputs // 2
    if kind == "modulation":
        scale_bytes = ELEMENT_BYTES * (inputs // MODULATION_GROUP) * outputs
        return weight_bytes, scale_bytes, scale_bytes
    group, scale_bytes = GROUPS[precision]
    tensors = [weight_bytes, inputs // group * outputs * scale_bytes]
    output_bytes = [ELEMENT_BYTES * outputs * RANK]
    if precision == "svdq-fp4":
        output_bytes += [ELEMENT_BYTES * outputs, ELEMENT_BYTES]
    tensors += output_bytes
    if kind != "shared":
        tensors += [ELEMENT_BYTES * inputs * RANK, ELEMENT_BYTES * inputs, ELEMENT_BYTES * inputs]
    if kind == "split":
        tensors += [*output_bytes, ELEMENT_BYTES * outputs]
    return tuple(tensors)


def layer_kind(path: str, plain: Collection[str] = ()) -> LayerKind | None:
    """Return the kind of the linear layer at ``path`` in a file; None if it stays in 16 bits.

    ``plain``: modules that stay in 16 bits.
    """
    name = path.rpartition(".")[2]
    if not _IN_BLOCK.search(path) or _PLAIN in path.split("."):
        return None
    if any(f"{path}.".startswith(f"{module}.") for module in plain):
        return None
    if path.endswith(_MODULATION):
        return "modulation"
    return "shared" if name in _SHARED else "split" if name == _SPLIT else "own"


def scratch_bytes(rows: int, inputs: int, precision: str) -> int:
    """Return the bytes of an input of ``rows`` rows, quantized, next to its product."""
    group, scale_bytes = GROUPS[precision]
    padded_rows = -(-rows // PADDED_ROWS) * PADDED_ROWS
    return padded_rows * (inputs // 2 + inputs // group * scale_bytes + 4 * RANK)
