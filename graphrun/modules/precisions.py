"""Names of precisions that are made of linear layers of another kind. Imports nothing: whoever reads plans needs no torch."""

from __future__ import annotations

QUANTIZED = ("int8", "nf4", "fp8", "gguf")
