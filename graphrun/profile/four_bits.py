"""Which cards multiply 4-bit weights by 4-bit activations (SVDQuant), and in which format.

nunchaku's kernels: int4 from compute capability 7.5 to 8.9 (Turing, Ampere, Ada), fp4 on 12.0
(`check_hardware_compatibility` and `get_precision` in nunchaku/utils.py, commit 3a3cc3d). diffusers
0.42.1 refuses 9.0 as well (quantizers/nunchaku/nunchaku_quantizer.py).
"""

from __future__ import annotations

from graphrun.errors import InputError
from graphrun.graph.precisions import PLANNED_ONLY
from graphrun.model.hardware import Hardware
from graphrun.profile.hardware import SHEETS

_FORMATS = {
    "turing": "svdq-int4",
    "ga10x": "svdq-int4",
    "ampere": "svdq-int4",
    "ada": "svdq-int4",
    "blackwell": "svdq-fp4",
}
CAPABILITIES = {"svdq-int4": "7.5 to 8.9", "svdq-fp4": "12.0"}


def four_bit_format(hardware: Hardware) -> str:
    """Return the SVDQuant format that ``hardware`` multiplies; "" for none, or an unknown card."""
    sheets = {
        name: sheet
        for name, sheet in SHEETS.items()
        if name in hardware.name and sheet.device == hardware.device
    }
    if hardware.unified or not sheets:
        return ""
    return _FORMATS.get(sheets[max(sheets, key=len)].architecture, "")


def refuse_other_formats(allow: tuple[str, ...], hardware: Hardware) -> None:
    """Raise InputError for an SVDQuant format in ``allow`` that ``hardware`` does not multiply."""
    card_format = four_bit_format(hardware)
    for name in PLANNED_ONLY:
        if name in allow and name != card_format:
            suggestion = f"allow {card_format} in its place" if card_format else "leave it out"
            raise InputError(
                f"allow {name}: {hardware.name} does not multiply it, which takes compute "
                f"capability {CAPABILITIES[name]}: {suggestion}"
            )
