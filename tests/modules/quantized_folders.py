"""Folders of a FLUX transformer that diffusers quantized with bitsandbytes or torchao, without a
GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrun.modules.torchao_files import CONFIGS as TORCHAO_CONFIGS


def loaded(folder: Path, **options: Any) -> Any:
    """The module as diffusers loads it. diffusers asks for a GPU, and then computes without one."""
    from diffusers import FluxTransformer2DModel
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("BnB4BitDiffusersQuantizer", "BnB8BitDiffusersQuantizer"):
            patch.setattr(
                getattr(bnb_quantizer, kind), "validate_environment", lambda *_, **__: None
            )
        return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **options)


def quantization(kind: str) -> Any:
    """The settings of ``nf4``, of ``nested`` (nf4 with quantized statistics), of ``int8``, or of
    torchao's ``int8wo`` and ``fp8wo``."""
    from diffusers import BitsAndBytesConfig, TorchAoConfig

    if kind in TORCHAO_CONFIGS.values():
        kinds = pytest.importorskip("torchao.quantization")
        (name,) = (name for name, precision in TORCHAO_CONFIGS.items() if precision == kind)
        return TorchAoConfig(getattr(kinds, name)())
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=kind == "nested",
    )


def quantized_flux(folder: Path, kind: str) -> None:
    """Quantizes the transformer in ``folder``."""
    # bitsandbytes asks for CUDA without a map; what torchao quantized with one is not saved
    options = {} if kind in TORCHAO_CONFIGS.values() else {"device_map": {"": "cpu"}}
    module = loaded(folder, quantization_config=quantization(kind), **options)
    shutil.rmtree(folder)
    module.save_pretrained(folder)
