"""LoRAs: which components a file changes, and graphs with LoRAs that a caller adds.

A LoRA is fused into weights while these are read (`graphrun.modules.lora`), so it takes no memory
of its own, and no published checkpoint that is already quantized can have it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from graphrun.errors import InputError
from graphrun.graph.graph import HEADER_BYTES, Graph
from graphrun.graph.parts import Adapter, Component
from graphrun.graph.precisions import PLANNED_ONLY, is_gguf
from graphrun.graph.values import listed_names
from graphrun.reading import open_regular, parse_json, safetensors_header

# suffix of a tensor's name -> which half of the weight difference it is
SUFFIXES = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
}
OWNERS = ("unet.", "transformer.", "text_encoder")  # names of tensors begin with their component
DENOISERS = ("transformer", "unet")  # components of names that begin with no component
UNFUSIBLE = ("fp8",)  # and GGUF: formats without a weight to add to


def own_keys(keys: Iterable[str], component: str) -> tuple[str, list[str]]:
    """Return the tensors among ``keys`` that are for ``component``, and the prefix of their
    names."""
    prefix, names = f"{component}.", list(keys)
    if prefixed := [key for key in names if key.startswith(prefix)]:
        return prefix, prefixed
    return "", [key for key in names if not key.startswith(OWNERS)]


class LoraUse(NamedTuple):
    """A LoRA in a graph. ``name``: for people, who never see ``file``. ``stamp``: of the file,
    which changes with its content. ``components``: that it changes."""

    name: str
    scale: float
    file: str
    stamp: tuple[int, int]
    components: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A safetensors file with a LoRA. ``keys``: the names of its tensors."""

    path: Path
    stamp: tuple[int, int]
    keys: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> LoraFile:
        """Read the names of the tensors in ``path``. Raises InputError for another file."""
        with open_regular(path) as file:
            text, state = safetensors_header(file, HEADER_BYTES)[1], path.stat()
        try:
            header = parse_json(text)
        except ValueError as error:
            raise InputError(f"is no safetensors file: {error}", str(path)) from None
        keys = tuple(header) if isinstance(header, dict) else ()
        if not any(key.endswith(tuple(SUFFIXES)) for key in keys):
            examples = ", ".join(sorted(keys)[:3]) or "nothing"
            raise InputError(
                f"is no LoRA in the layout of diffusers: it has {examples}; load it with "
                "diffusers' load_lora_weights and write it with save_lora_weights",
                str(path),
            )
        return cls(path, (state.st_size, state.st_mtime_ns), keys)

    def components_in(self, graph: Graph) -> tuple[str, ...]:
        """Return the components of ``graph`` that the file may change; none if it is for another
        model."""
        names = tuple(name for name in graph.components if own_keys(self.keys, name)[0])
        if not names and not any(key.startswith(OWNERS) for key in self.keys):
            names = tuple(name for name in DENOISERS if name in graph.components)[:1]
        return names if all(_is_fusible(graph.components[name]) for name in names) else ()


def lora_files(folder: Path) -> dict[str, LoraFile]:
    """Return the LoRAs in ``folder``, NAME.safetensors each, by name. Raises InputError for a
    folder that cannot be read and for a file that is no LoRA."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise InputError(f"--loras {folder}: {error.strerror}") from error
    return {path.stem: LoraFile.read(path.resolve()) for path in paths}


def with_loras(graph: Graph, uses: Sequence[LoraUse]) -> Graph:
    """Return ``graph`` with LoRAs after those of the file. What a plan may choose is as for a graph
    file with the same ``loras:``."""
    components = dict(graph.components)
    for use in uses:
        for name in use.components:
            component = components[name]
            components[name] = replace(
                component,
                checkpoints=(),
                gguf="",
                precision=tuple(filter(_takes_loras, component.precision)),
                loras=(*component.loras, Adapter(use.file, use.scale)),
            )
    return replace(graph, components=components) if uses else graph


def known_permissions(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that mean something in ``graph``, whose LoRAs leave fewer
    precisions to allow."""

    def is_known(name: str) -> bool:
        try:
            return bool(graph.allowed((name,)))
        except InputError:
            return False

    return tuple(filter(is_known, listed_names(names)))


def without_paths(text: str, uses: Collection[LoraUse]) -> str:
    """Return ``text`` with the names of LoRAs in place of their files."""
    for use in uses:
        text = text.replace(use.file, use.name)
    return text


def _is_fusible(component: Component) -> bool:
    return bool(component.precision) and _takes_loras(component.precision[0])


def _takes_loras(precision: str) -> bool:
    return not is_gguf(precision) and precision not in (*UNFUSIBLE, *PLANNED_ONLY)
