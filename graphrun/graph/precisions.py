"""Names of the precisions that replace linear layers by quantized ones, and what they mean.

    int8, nf4        bitsandbytes; read from files in that precision, else quantized when read
    fp8              one byte per weight; read from files in that precision, else cast when read
    int8wo, fp8wo    torchao, with one byte per weight; read from files in that precision
    gguf             the GGUF file under ``gguf:``
    Q4_K_S, Q8_0...  a published GGUF file under ``checkpoints:``, by the name of its mix of types
    svdq-int4/fp4    a published SVDQuant file under ``checkpoints:``: planned, never run

Imports nothing, so that reading a plan needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

# mix of a GGUF file -> the type of most of its weights, which planning without the file assumes
# (llama.cpp's `llama_tensor_get_type`; `_S` and `_M` differ in a few tensors)
GGUF_MIXES: Mapping[str, str] = {
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_0": "Q5_0",
    "Q5_1": "Q5_1",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
}
# GGUF type -> (elements, bytes) of a block: the structs of ggml's ggml-common.h
GGUF_BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
ONLY_IN_FILES = ("int8wo", "fp8wo")  # torchao's: nothing is quantized to them
# SVDQuant (W4A4). diffusers' loader (`NunchakuLiteQuantizer` in diffusers 0.42.1) refuses without
# CUDA, and no run could be compared with it: plans have these formats by name only, and no run.
PLANNED_ONLY = ("svdq-int4", "svdq-fp4")
QUANTIZED = ("int8", "nf4", "fp8", *ONLY_IN_FILES, "gguf", *GGUF_MIXES, *PLANNED_ONLY)
# names for all precisions of about so many bits per weight that graphrun runs
CLASSES: Mapping[str, tuple[str, ...]] = {
    "4bit": ("nf4", *(name for name in GGUF_MIXES if name.startswith("Q4"))),
    "5bit": tuple(name for name in GGUF_MIXES if name.startswith("Q5")),
    "6bit": ("Q6_K",),
    "8bit": ("int8", "fp8", *ONLY_IN_FILES, "Q8_0"),
}


def is_gguf(precision: str) -> bool:
    """Return whether weights in ``precision`` come from a GGUF file."""
    return precision == "gguf" or precision in GGUF_MIXES


def is_published_only(precision: str) -> bool:
    """Return whether ``precision`` is only read from a checkpoint under ``checkpoints:``."""
    return precision in GGUF_MIXES or precision in PLANNED_ONLY


def planned_only_reason(precisions: Mapping[str, str]) -> str:
    """Return why a plan with ``precisions`` of components cannot run, and what to type; "" if it
    can."""
    names = {name: precision for name, precision in precisions.items() if precision in PLANNED_ONLY}
    if not names:
        return ""
    formats = ", ".join(f"{name} in {precision}" for name, precision in names.items())
    options = " ".join(f"--allow {precision}" for precision in dict.fromkeys(names.values()))
    return (
        f"{formats} is planned only, since graphrun does not load SVDQuant checkpoints: plan "
        f"without {options} (--allow 4bit has formats that run)"
    )
