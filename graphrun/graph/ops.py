"""The signatures of the ops as data: the names and kinds of their arguments and outputs.
`graphrun.ops` implements them.

An op is one of `OPERATIONS`, or a function of a trusted package that `op` declares:
``mypackage.mymodule:sharpen``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from graphrun.graph.values import strings

Kind = Literal[
    "str",
    "int",
    "float",
    "bool",
    "embeds",
    "latents",
    "image",
    "mask",
    "video",
    "audio",
    "tensor",
    "any",
]

# Kinds that a graph file or a run's inputs may hold as plain values; the others only pass between
# stages.
PLAIN_KINDS: frozenset[Kind] = frozenset({"str", "int", "float", "bool"})
# Kinds that a run takes as a file, or in Python as an object. A plan depends on their size.
MEDIA_KINDS: frozenset[Kind] = frozenset({"image", "mask", "video", "audio", "tensor"})
# Where `op` notes what a function declares.
DECLARED = "__graphrun_op__"

Function = TypeVar("Function", bound=Callable[..., Mapping[str, Any]])


@dataclass(frozen=True, slots=True)
class Operation:
    """The signature of an op: its ``required`` and ``optional`` arguments and its ``outputs``, each
    name with its kind.

    ``options``: alternative ways to run it -> what must be allowed, since the output changes ("":
    nothing, it does not change). ``open``: it takes and produces more, of kind ``any``; the
    pipeline's class decides, and is asked when the stage is planned. ``outlined``: arguments of
    which it reads only shapes and dtypes.
    """

    name: str
    required: Mapping[str, Kind]
    optional: Mapping[str, Kind]
    outputs: Mapping[str, Kind]
    options: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    outlined: frozenset[str] = frozenset()

    @property
    def own(self) -> bool:
        """Whether it is a function of a trusted package."""
        return ":" in self.name

    @property
    def arguments(self) -> dict[str, Kind]:
        """All arguments with their kinds, the required ones first."""
        return {**self.required, **self.optional}

    def argument(self, name: str) -> Kind | None:
        """The kind of the argument ``name``; None where there is none."""
        return self.arguments.get(name, "any" if self.open else None)

    def output(self, name: str) -> Kind | None:
        """The kind of the output ``name``; None where there is none."""
        return self.outputs.get(name, "any" if self.open and name.isidentifier() else None)


def _table(*operations: Operation) -> Mapping[str, Operation]:
    return MappingProxyType({operation.name: operation for operation in operations})


OPERATIONS: Mapping[str, Operation] = _table(
    Operation(
        "encode_prompt",
        required={"prompt": "str"},
        optional={
            "negative_prompt": "str",
            "guidance_scale": "float",
            "true_cfg_scale": "float",
            "num_images": "int",
            "max_sequence_length": "int",
        },
        outputs={"embeds": "embeds"},
    ),
    Operation(
        "denoise",
        required={"embeds": "embeds"},
        optional={
            "height": "int",
            "width": "int",
            "steps": "int",
            "guidance_scale": "float",
            "guidance_scale_2": "float",
            "true_cfg_scale": "float",
            "seed": "int",
            "num_images": "int",
            "num_frames": "int",
            "use_resolution_binning": "bool",
        },
        outputs={"latents": "latents"},
        options={"split": "split"},
    ),
    Operation(
        "decode",
        required={"latents": "latents", "embeds": "embeds"},
        optional={
            "height": "int",
            "width": "int",
            "num_frames": "int",
            "use_resolution_binning": "bool",
            "tiling": "bool",
        },
        outputs={"image": "image"},
        options={"tiling": "tiling", "slicing": "", "tiling+slicing": "tiling"},
        outlined=frozenset({"embeds"}),
    ),
    Operation(
        "call",
        required={},
        optional={"seed": "int", "tiling": "bool"},
        outputs={"image": "image", "video": "video", "audio": "audio", "latents": "latents"},
        options={"tiling": "tiling", "slicing": "", "tiling+slicing": "tiling"},
        open=True,
    ),
    Operation(
        "block",
        required={},
        optional={"blocks": "any", "seed": "int"},
        outputs={"image": "image", "video": "video", "audio": "audio"},
        options={"tiling": "tiling", "slicing": "", "tiling+slicing": "tiling"},
        open=True,
    ),
    Operation("depth", required={"image": "image"}, optional={}, outputs={"image": "image"}),
)


def operation(name: str) -> Operation | None:
    """The signature of the op ``name``; None where there is none. That of a function is only known
    when its package is imported, so it takes and returns anything, of the kinds that its outputs'
    names say."""
    if ":" in name:
        return Operation(
            name, {}, {}, {"image": "image", "video": "video", "audio": "audio"}, open=True
        )
    return OPERATIONS.get(name)


def op(*, changes: Collection[str] = ()) -> Callable[[Function], Function]:
    """Declares that a function is an op, which stages of a graph may name: ``op:
    mypackage.mymodule:function``.

    It is called with the stage's ``with:`` and ``uses:`` by name, with the graph's parts that it
    has a parameter for, and with the device as ``device``. It returns its outputs by name;
    ``image``, ``video`` and ``audio`` are what runs save as files. ``changes``: the arguments whose
    tensors it changes in place; it gets copies of these, since other stages may read them too.
    """

    def declare(function: Function) -> Function:
        setattr(function, DECLARED, frozenset(strings(changes)))
        return function

    return declare
