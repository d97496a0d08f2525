"""The elements of a graph: components, parts, pipelines, stages, and references between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun.graph.ops import Operation, operation
from graphrun.graph.precisions import is_published_only
from graphrun.limits import require

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference in a graph file: ``$prompt`` is ``Reference("input", "prompt", "")``,
    ``$encode.embeds`` is ``Reference("stage", "encode", "embeds")``."""

    kind: Literal["input", "stage"]
    name: str
    output: str = ""

    def __str__(self) -> str:
        return f"${self.name}.{self.output}" if self.output else f"${self.name}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or an IP-Adapter: the absolute path of its file, and its scale, which multiplies the
    weight difference of a LoRA, or the image prompts of an IP-Adapter."""

    file: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint of a component in a quantized format.

    ``format``: a precision. ``source``: as for a `Component`. ``nbytes``: of its files, from its
    page; 0: not stated. ``plain``: the modules that a GGUF file stores in 16 bits or more, as
    planned until the file is here. ``license``: of the checkpoint, with its page.
    """

    format: str
    source: str
    nbytes: int = 0
    plain: tuple[str, ...] = ()
    license: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """A module with weights.

    ``source``: the folder, safetensors file or hub path (``owner/repo@revision/subfolder``); None:
    random weights made from ``seed``. ``variant``: which of a folder's files are read (``fp16``).
    ``gguf``: the file for precision gguf. ``checkpoints``: published ones, whose formats are among
    ``precision``. ``loras``: fused into the weights of ``source`` or ``gguf``. ``config``: of the
    class if ``has_config``; ``{}``: the constructor's defaults. ``precision``: the default first;
    the others must be allowed. ``backing_store``: the kinds of memory allowed for the master copy;
    empty: any. ``compile``: ``blocks`` asks for compiled blocks. ``keep_fp32``: keep in
    float32 what `from_pretrained` keeps in it. ``file_line``: ``file:line``, for errors.
    """

    name: str
    class_path: str
    source: str | None
    config: dict[str, Any]
    has_config: bool
    dtype: str
    precision: tuple[str, ...]
    seed: int = 0
    backing_store: tuple[str, ...] = ()
    loras: tuple[Adapter, ...] = ()
    variant: str = ""
    gguf: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    ip_adapters: tuple[Adapter, ...] = ()
    compile: str = ""
    keep_fp32: bool = True
    file_line: str = field(default="", compare=False)

    def in_dtype(self, dtype: str) -> Component:
        """Return the component that computes in ``dtype``; quantized precisions stay."""
        names = (dtype if name == self.dtype else name for name in self.precision)
        return replace(self, dtype=dtype, precision=tuple(dict.fromkeys(names)))

    def source_in(self, precision: str) -> str | None:
        """Return the source of the weights in ``precision``; None for random weights."""
        if (checkpoint := self.checkpoint(precision)) is not None:
            return checkpoint.source
        return self.gguf or None if precision == "gguf" else self.source

    def checkpoint(self, precision: str) -> Checkpoint | None:
        return next((item for item in self.checkpoints if item.format == precision), None)

    @property
    def sources(self) -> tuple[str, ...]:
        texts = (self.source, self.gguf, *(item.source for item in self.checkpoints))
        return tuple(text for text in texts if text)

    def without_checkpoints(self) -> Component:
        """Return the component without published checkpoints and their precisions."""
        names = tuple(name for name in self.precision if not is_published_only(name))
        return replace(self, checkpoints=(), precision=names)

    def permission(self, precision: str, device: str = "device") -> str | None:
        """Return what a caller must allow before a plan may use ``precision`` on ``device``.

        ``device``: ``device`` or ``cpu``. The result is a precision, ``cpu``, or "" if nothing must
        be allowed; None if the graph does not list the precision.
        """
        if precision not in self.precision or (device == "cpu" and precision != self.precision[0]):
            return None
        return "cpu" if device == "cpu" else "" if precision == self.precision[0] else precision

    def is_compiled(self, allow: Collection[str]) -> bool:
        """Return whether a run compiles the blocks: the graph asks for it and ``allow`` has it."""
        return bool(self.compile) and "compile" in allow


@dataclass(frozen=True, slots=True)
class Part:
    """An object without weights for the pipeline's code, such as a tokenizer or a scheduler."""

    name: str
    class_path: str
    config: dict[str, Any]
    has_config: bool = False
    file: Path | None = None
    source: str | None = None
    file_line: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline class with constructor arguments.

    ``members``: the pipeline's name for a component or part -> the graph's name; None: the pipeline
    gets none. ``program``: the class may be any class of a trusted package, whose objects are built
    from attributes.
    """

    class_path: str
    config: Mapping[str, Any]
    members: Mapping[str, str | None] = field(default_factory=dict)
    file_line: str = field(default="", compare=False)
    program: bool = False

    @property
    def content(self) -> list[Any]:
        """Everything except the line in the file."""
        return [self.class_path, self.config, self.members]

    def by_pipeline_name(self, things: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``things`` of the graph (components or parts) under the pipeline's names."""
        member_things = {
            name: things[graph_name]
            for name, graph_name in self.members.items()
            if graph_name is not None and graph_name in things
        }
        return {
            **{name: thing for name, thing in things.items() if name not in self.members},
            **member_things,
        }


@dataclass(frozen=True, slots=True)
class Stage:
    """One op with its arguments and the components it uses.

    ``arguments``: literals, references, or lists of them. ``options``: alternatives that a plan may
    choose, such as ``tiling``. ``outputs``: for an ``open`` op, those that the graph reads.
    ``pipeline``: the further pipeline of the stage; "": the graph's own. ``method``: the method
    that a call stage calls. ``for_each``: the argument whose list is processed item by item; "":
    none.
    """

    name: str
    op: str
    uses: tuple[str, ...]
    arguments: Mapping[str, Any]
    file_line: str = field(default="", compare=False)
    options: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    pipeline: str = ""
    method: str = "__call__"
    for_each: str = ""

    @property
    def operation(self) -> Operation:
        signature = operation(self.op)
        assert signature is not None
        return signature

    @property
    def references(self) -> tuple[Reference, ...]:
        return tuple(_references(list(self.arguments.values())))

    def refuse_large(self, inputs: Mapping[str, Any]) -> None:
        """Raise InputError for sizes and steps above the limits: pipelines compute tables of these
        sizes on the host, or loop that often."""
        values = {
            name: inputs.get(value.name)
            if isinstance(value, Reference) and value.kind == "input"
            else value
            for name, value in self.arguments.items()
        }
        numbers = {name: value for name, value in values.items() if isinstance(value, int)}
        for name, value in numbers.items():
            if name.endswith("steps"):
                require("steps", value, f"stages.{self.name}: {name} is {value:,}", self.file_line)
        height, width = numbers.get("height", 1), numbers.get("width", 1)
        require(
            "pixels",
            height * width,
            f"stages.{self.name}: {width} x {height} are {height * width:,} pixels",
            self.file_line,
        )

    def permission(self, option: str) -> str | None:
        """Return what a caller must allow before a plan may run the stage with ``option``; "":
        nothing; None: the graph does not list the option."""
        return self.operation.options[option] if option in self.options else None


@dataclass(frozen=True, slots=True)
class Directives:
    """Placement that the user demands of every plan.

    ``keep``: components that stay on the device from their first use to the end. ``exclude``:
    components that are always streamed, with no block kept on the device. ``pin``: components whose
    backing store is page-locked. ``reserve_bytes``: bytes of the VRAM budget left to other
    programs.
    """

    keep: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    reserve_bytes: int = 0
    pin: tuple[str, ...] = ()


def _references(value: Any) -> Iterator[Reference]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, Reference):
        yield value
