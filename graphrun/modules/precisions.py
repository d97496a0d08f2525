"""Names of the precisions that replace linear layers by quantized ones.

Imports nothing, so that reading a plan needs no torch.
"""

from __future__ import annotations

QUANTIZED = ("int8", "nf4", "fp8", "gguf")
