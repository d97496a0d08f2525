"""Recipes of one file with weights: a checkpoint in the layout of those who trained it, or a GGUF transformer.

Decides which pipeline it belongs to (diffusers' own table, `DIFFUSERS_DEFAULT_PIPELINE_PATHS`) and which components it holds. Of
the file the header is read; configurations, tokenizers and what it lacks are those of a folder or repository in diffusers' layout.

    sdxl.safetensors   | unet | vae | text_encoder | text_encoder_2 |    tokenizers, scheduler, configurations: the repository's
    flux-Q4_K_S.gguf   | transformer |                                   and the encoders and the vae too
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from graphrun.diffusers_.importing.spec import MemberSpec, PipelineSpec, dtype_of, slug
from graphrun.errors import GraphError, InputError
from graphrun.graph.graph import Component
from graphrun.modules.build import meta_module
from graphrun.modules.contents import Content, as_stored, content_of, refuse_missing, tensors_in
from graphrun.modules.gguf import shape_of
from graphrun.modules.quantize import quantizable_layers
from graphrun.modules.source_files import Stored

ONE_FILE = (".safetensors", ".gguf")
NOT_OF_A_FILE = ("safety_checker",)  # diffusers' `SINGLE_FILE_OPTIONAL_COMPONENTS`
# diffusers takes a file that it does not know for Stable Diffusion 1.x: those have this tensor.
SURE = {"v1": "model.diffusion_model.output_blocks.11.0.skip_connection.weight"}


def of_file(file: Path, config: str | None, base_of: Callable[[str], PipelineSpec]) -> PipelineSpec:
    """The recipe of the checkpoint ``file``. ``config``: whose configurations they are, asked of ``base_of``; left out, the
    repository that diffusers knows the file's layout by.

    Raises InputError where the file is of no such pipeline, GraphError where it is broken or lacks tensors of a component.
    """
    if not file.is_file():
        raise InputError(f"no such file: {file}")
    file = file.resolve()
    base = base_of(config or repository_of(file))
    found, reasons = dict[str, tuple[MemberSpec, Content]](), dict[str, str]()
    for name, member in base.components.items():
        held = _held(member, file, base)
        if isinstance(held, str):
            reasons[name] = held
        else:
            found[name] = held
    if not found:
        said = "; ".join(reasons.values())
        raise InputError(f"{file} has no component of {base.origin} ({base.pipeline}): {said}. Give its own with --config FOLDER")
    _refuse_twins(file, {name: content for name, (_, content) in found.items()})
    members = tuple(
        found[t.name][0] if t.name in found else t for t in base.members if t.name in found or t.name not in NOT_OF_A_FILE
    )
    elsewhere = [t.name for t in members if t.is_component and t.name not in found]
    notes = (f"The file holds {', '.join(found)}" + (f"; {', '.join(elsewhere)}: of {base.origin}." if elsewhere else "."),)
    return replace(base, origin=str(file), name=slug(file.stem), members=members, notes=(*base.notes, *notes))


def repository_of(file: Path) -> str:
    """The repository with the configurations of the pipeline that ``file`` is a checkpoint of, by diffusers' table.

    Raises InputError where diffusers does not know the file, or knows it as a model that is no pipeline.
    """
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS, infer_diffusers_model_type

    stored = tensors_in(file, _component("", "", file), _precision(file))
    shapes = {t.name: shape_of(t.shape, t.quant) if t.quant else t.shape for t in stored}
    give = "say whose configurations are its own: --config FOLDER, or --config OWNER/NAME on the hub"
    try:
        kind = infer_diffusers_model_type({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    except (KeyError, IndexError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"diffusers cannot tell which pipeline {file} is of: {give}") from error
    if SURE.get(kind, next(iter(shapes), "")) not in shapes:
        raise InputError(f"diffusers does not know which pipeline {file} is of: {give}")
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


def _component(name: str, class_path: str, file: Path, config: object = None) -> Component:
    """What reading a header asks for; dtypes do not matter there."""
    made = dict(config) if isinstance(config, dict) else {}
    return Component(name, class_path, str(file), made, True, "bfloat16", ("bfloat16",), where=str(file), gguf=str(file))


def _held(member: MemberSpec, file: Path, base: PipelineSpec) -> tuple[MemberSpec, Content] | str:
    """``member`` as the file holds it, or what says that the file is without it. Raises GraphError where it holds another model."""
    component = _component(member.name, member.class_path, file, member.config)
    module = meta_module(component, ())
    try:
        content = content_of(component, module, file, _precision(file))
    except GraphError as error:
        if isinstance(error.__cause__, InputError):  # no conversion of the class goes through with it
            return f"{member.name}: {error.__cause__}"
        raise GraphError(f"{error}; --config names whose configurations are its own") from error
    if not content.pieces:
        return f"{member.name}: no tensor of it"
    refuse_missing(content, module.state_dict(), component)
    if file.suffix == ".gguf":  # what is not quantized there is read in the dtype that the others have
        return replace(member, more={"precision": ["gguf"]}, gguf=str(file)), content
    dtype, why = dtype_of({}, [(piece.dtype, piece.nbytes) for piece in content.pieces.values()])
    made = replace(member, dtype=dtype or member.dtype, why=why or member.why)
    layers = {f"{path}.weight" for path in quantizable_layers(module, torch.bfloat16)}
    more = {"precision": list(found)} if (found := as_stored(content, layers)) else {}
    return replace(made, source=str(file), more=more), content


def _refuse_twins(file: Path, found: dict[str, Content]) -> None:
    """Raises InputError where two components would be the same tensors of the file, as Wan's two experts."""
    first: dict[frozenset[Stored], str] = {}
    for name, content in found.items():
        pieces = content.pieces.values()
        read = frozenset(leaf for piece in pieces for leaf in ((piece,) if isinstance(piece, Stored) else piece.leaves))
        other = first.setdefault(read, name)
        if other != name:
            key = "gguf:, with precision: [gguf]," if file.suffix == ".gguf" else "source:"
            raise InputError(
                f"{file} may be {other} or {name}, which have one layout: import the folder or repository, and name the file as "
                f"{key} of the one that it is"
            )
