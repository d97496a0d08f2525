"""Pipelines from one file with weights: a checkpoint in its authors' layout, or a GGUF transformer.

diffusers' table `DIFFUSERS_DEFAULT_PIPELINE_PATHS` maps the file to its pipeline. Only the file's
header is read. Everything that the file does not contain comes from a folder or repository in
diffusers' layout.

    file               components in the file                    from the folder or repository
    sdxl.safetensors   unet, vae, text_encoder, text_encoder_2   tokenizers, scheduler, configs
    flux-Q4_K_S.gguf   transformer                               also the text encoders and the VAE
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from graphrun.diffusers_.importing.found import PipelineDescription, dtype_of, slug
from graphrun.errors import GraphError, InputError
from graphrun.graph.parts import Component
from graphrun.modules.build import meta_module
from graphrun.modules.contents import Content, as_stored, content_of, refuse_missing, tensors_in
from graphrun.modules.gguf import shape_of
from graphrun.modules.quantize import quantizable_layers
from graphrun.modules.source_files import Stored

ONE_FILE = (".safetensors", ".gguf")
NOT_OF_A_FILE = ("safety_checker",)  # diffusers' `SINGLE_FILE_OPTIONAL_COMPONENTS`
# diffusers classifies any unknown file as Stable Diffusion 1.x ("v1"); a real one has this tensor
REQUIRED_TENSORS = {"v1": "model.diffusion_model.output_blocks.11.0.skip_connection.weight"}


def of_file(
    file: Path, config: str | None, load_base: Callable[[str], PipelineDescription]
) -> PipelineDescription:
    """Return the description of the pipeline of the checkpoint ``file``.

    ``config``: the source of the configurations, read by ``load_base``; None: the repository in
    diffusers' table. Raises InputError if the file does not belong to that pipeline, GraphError if
    the file is damaged or tensors of a component are missing.
    """
    if not file.is_file():
        raise InputError(f"no such file: {file}")
    file = file.resolve()
    base = load_base(config or repository_of(file))
    contents, reasons = dict[str, Content](), list[str]()
    for name in list(base.components):
        content = _use_file(base, name, file)
        if isinstance(content, str):
            reasons.append(content)
        else:
            contents[name] = content
    if not contents:
        reason_text = "; ".join(reasons)
        raise InputError(
            f"{file} has no component of {base.origin} ({base.pipeline}): {reason_text}. Give "
            "its own with --config FOLDER"
        )
    _refuse_twins(file, contents)
    for name in set(NOT_OF_A_FILE) - contents.keys():
        base.components.pop(name, None)
        base.parts.pop(name, None)
    other_names = [name for name in base.components if name not in contents]
    notes = f"The file has {', '.join(contents)}" + (
        f"; {', '.join(other_names)}: of {base.origin}." if other_names else "."
    )
    base.origin, base.name, base.notes = str(file), slug(file.stem), (*base.notes, notes)
    return base


def repository_of(file: Path) -> str:
    """Return the repository with the configurations for ``file``, from diffusers' table. Raises
    InputError if diffusers does not recognize the file, or recognizes only a part of a pipeline."""
    from diffusers.loaders.single_file_utils import (
        DIFFUSERS_DEFAULT_PIPELINE_PATHS,
        infer_diffusers_model_type,
    )

    empty = Component(
        "", "", str(file), {}, True, "bfloat16", (), gguf=str(file), file_line=str(file)
    )
    tensors = tensors_in(file, empty, _precision(file))
    shapes = {
        tensor.name: shape_of(tensor.shape, tensor.quant) if tensor.quant else tensor.shape
        for tensor in tensors
    }
    suggestion = (
        "name the source of its configurations: --config FOLDER, or --config OWNER/NAME on the hub"
    )
    try:
        kind = infer_diffusers_model_type(
            {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        )
    except (KeyError, IndexError, RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"diffusers cannot tell which pipeline {file} belongs to: {suggestion}"
        ) from error
    if REQUIRED_TENSORS.get(kind, next(iter(shapes), "")) not in shapes:
        raise InputError(f"diffusers does not know which pipeline {file} belongs to: {suggestion}")
    default_paths = DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]
    repository = str(default_paths["pretrained_model_name_or_path"])
    if "subfolder" in default_paths or "controlnet" in kind or "animatediff" in kind:
        raise InputError(
            f"{file} is a part of a pipeline ({kind}: {repository}): import the pipeline, and "
            "name the file as source: of the "
            "component in the graph, or give --config FOLDER"
        )
    return repository


def _precision(file: Path) -> str:
    return "gguf" if file.suffix == ".gguf" else ""


def _use_file(base: PipelineDescription, name: str, file: Path) -> Content | str:
    """Make ``file`` the source of component ``name``, and return the component's tensors.

    If the file does not contain the component, return the reason as text instead. Raises GraphError
    if shapes differ or some tensors are missing.
    """
    base_component = base.components[name]
    # the dtype does not matter
    component = replace(
        base_component, source=str(file), dtype="bfloat16", gguf=str(file), file_line=str(file)
    )
    module = meta_module(component, base.trust)
    try:
        content = content_of(component, module, file, _precision(file))
    except GraphError as error:
        # diffusers cannot convert the file to this class
        if isinstance(error.__cause__, InputError):
            return f"{name}: {error.__cause__}"
        raise GraphError(f"{error}; --config names the source of its configurations") from error
    if not content.pieces:
        return f"{name}: no tensor of it"
    refuse_missing(content, module.state_dict(), component)
    # tensors that are not quantized are read in the most common dtype of the components
    if file.suffix == ".gguf":
        base.components[name] = replace(base_component, precision=("gguf",), gguf=str(file))
        return content
    dtype, reason = dtype_of({}, [(piece.dtype, piece.nbytes) for piece in content.pieces.values()])
    layers = {f"{path}.weight" for path in quantizable_layers(module, torch.bfloat16)}
    precision = tuple(as_stored(content, layers))
    base.components[name] = replace(
        base_component, source=str(file), dtype=dtype or base_component.dtype, precision=precision
    )
    base.reasons[name] = reason or base.reasons[name]
    return content


def _refuse_twins(file: Path, contents: dict[str, Content]) -> None:
    """Raise InputError if two components would read the same tensors (Wan's two experts)."""
    first: dict[frozenset[Stored], str] = {}
    for name, content in contents.items():
        pieces = content.pieces.values()
        tensors = frozenset(
            leaf
            for piece in pieces
            for leaf in ((piece,) if isinstance(piece, Stored) else piece.leaves)
        )
        other = first.setdefault(tensors, name)
        if other != name:
            key = "gguf:, with precision: [gguf]," if file.suffix == ".gguf" else "source:"
            raise InputError(
                f"{file} may be {other} or {name}, which have one layout: import the folder or "
                "repository, and name the file as "
                f"{key} of the right one"
            )
