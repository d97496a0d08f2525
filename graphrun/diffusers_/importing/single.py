"""Pipelines from one file with weights: a checkpoint in its authors' layout, or a GGUF transformer.

diffusers' own table, `DIFFUSERS_DEFAULT_PIPELINE_PATHS`, tells which pipeline the file belongs to.
Only the file's header is read. Configurations, tokenizers and components that the file lacks come
from a folder or repository in diffusers' layout.

    file                 components in the file                            from the folder or
    repository sdxl.safetensors     unet, vae, text_encoder, text_encoder_2           tokenizers,
    scheduler, configurations flux-Q4_K_S.gguf     transformer
    the same, and the text encoders and the VAE
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from graphrun.diffusers_.importing.found import Found, dtype_of, slug
from graphrun.errors import GraphError, InputError
from graphrun.graph.graph import Component
from graphrun.modules.build import meta_module
from graphrun.modules.contents import Content, as_stored, content_of, refuse_missing, tensors_in
from graphrun.modules.gguf import shape_of
from graphrun.modules.quantize import quantizable_layers
from graphrun.modules.source_files import Stored

ONE_FILE = (".safetensors", ".gguf")
NOT_OF_A_FILE = ("safety_checker",)  # diffusers' `SINGLE_FILE_OPTIONAL_COMPONENTS`
# diffusers classifies an unknown file as Stable Diffusion 1.x ("v1"). Real ones have this tensor.
SURE = {"v1": "model.diffusion_model.output_blocks.11.0.skip_connection.weight"}


def of_file(file: Path, config: str | None, base_of: Callable[[str], Found]) -> Found:
    """The pipeline of the checkpoint ``file``.

    ``config``: the source of the configurations, which ``base_of`` reads; None: the repository in
    diffusers' table for the file's layout. Raises InputError where the file belongs to no such
    pipeline, GraphError where it is broken or lacks tensors of a component.
    """
    if not file.is_file():
        raise InputError(f"no such file: {file}")
    file = file.resolve()
    base = base_of(config or repository_of(file))
    held, reasons = dict[str, Content](), list[str]()
    for name in list(base.components):
        content = _take(base, name, file)
        if isinstance(content, str):
            reasons.append(content)
        else:
            held[name] = content
    if not held:
        said = "; ".join(reasons)
        raise InputError(
            f"{file} has no component of {base.origin} ({base.pipeline}): {said}. Give its own with --config FOLDER"
        )
    _refuse_twins(file, held)
    for name in set(NOT_OF_A_FILE) - held.keys():
        base.components.pop(name, None)
        base.parts.pop(name, None)
    elsewhere = [name for name in base.components if name not in held]
    notes = f"The file holds {', '.join(held)}" + (
        f"; {', '.join(elsewhere)}: of {base.origin}." if elsewhere else "."
    )
    base.origin, base.name, base.notes = str(file), slug(file.stem), (*base.notes, notes)
    return base


def repository_of(file: Path) -> str:
    """The repository with the configurations of the pipeline that ``file`` is a checkpoint of, by
    diffusers' table.

    Raises InputError where diffusers does not know the file, or knows it as a model that is only a
    part of a pipeline.
    """
    from diffusers.loaders.single_file_utils import (
        DIFFUSERS_DEFAULT_PIPELINE_PATHS,
        infer_diffusers_model_type,
    )

    empty = Component("", "", str(file), {}, True, "bfloat16", (), gguf=str(file), where=str(file))
    stored = tensors_in(file, empty, _precision(file))
    shapes = {t.name: shape_of(t.shape, t.quant) if t.quant else t.shape for t in stored}
    give = (
        "name the source of its configurations: --config FOLDER, or --config OWNER/NAME on the hub"
    )
    try:
        kind = infer_diffusers_model_type(
            {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        )
    except (KeyError, IndexError, RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"diffusers cannot tell which pipeline {file} belongs to: {give}"
        ) from error
    if SURE.get(kind, next(iter(shapes), "")) not in shapes:
        raise InputError(f"diffusers does not know which pipeline {file} belongs to: {give}")
    known = DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]
    repository = str(known["pretrained_model_name_or_path"])
    if "subfolder" in known or "controlnet" in kind or "animatediff" in kind:
        raise InputError(
            f"{file} is a part of a pipeline ({kind}: {repository}): import the pipeline, and name the file as source: of the "
            "component in the graph, or give --config FOLDER"
        )
    return repository


def _precision(file: Path) -> str:
    return "gguf" if file.suffix == ".gguf" else ""


def _take(base: Found, name: str, file: Path) -> Content | str:
    """The tensors of a component in ``file``, which becomes its source; a text, the reason, where
    the file does not hold it.

    Raises GraphError where the file holds the component with other shapes, or lacks some of its
    tensors.
    """
    declared = base.components[name]
    # the dtype does not matter
    component = replace(
        declared, source=str(file), dtype="bfloat16", gguf=str(file), where=str(file)
    )
    module = meta_module(component, base.trust)
    try:
        content = content_of(component, module, file, _precision(file))
    except GraphError as error:
        if isinstance(
            error.__cause__, InputError
        ):  # diffusers cannot convert the file to this class
            return f"{name}: {error.__cause__}"
        raise GraphError(f"{error}; --config names the source of its configurations") from error
    if not content.pieces:
        return f"{name}: no tensor of it"
    refuse_missing(content, module.state_dict(), component)
    if (
        file.suffix == ".gguf"
    ):  # its tensors that are not quantized are read in the dtype of most components
        base.components[name] = replace(declared, precision=("gguf",), gguf=str(file))
        return content
    dtype, reason = dtype_of({}, [(piece.dtype, piece.nbytes) for piece in content.pieces.values()])
    layers = {f"{path}.weight" for path in quantizable_layers(module, torch.bfloat16)}
    precision = tuple(as_stored(content, layers))
    base.components[name] = replace(
        declared, source=str(file), dtype=dtype or declared.dtype, precision=precision
    )
    base.reasons[name] = reason or base.reasons[name]
    return content


def _refuse_twins(file: Path, found: dict[str, Content]) -> None:
    """Raises InputError where two components would read the same tensors of the file, as Wan's two
    experts would."""
    first: dict[frozenset[Stored], str] = {}
    for name, content in found.items():
        pieces = content.pieces.values()
        read = frozenset(
            leaf
            for piece in pieces
            for leaf in ((piece,) if isinstance(piece, Stored) else piece.leaves)
        )
        other = first.setdefault(read, name)
        if other != name:
            key = "gguf:, with precision: [gguf]," if file.suffix == ".gguf" else "source:"
            raise InputError(
                f"{file} may be {other} or {name}, which have one layout: import the folder or repository, and name the file as "
                f"{key} of the right one"
            )
