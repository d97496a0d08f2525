"""Signatures of the ops as data: names and kinds of their arguments and outputs.

An op is one of `OPERATIONS`, which `graphrun.ops` implements, or a function of a trusted package
marked with `op`, named like ``mypackage.mymodule:sharpen``, or like ``mypackage.sharpen`` if the
installed package has an entry point of this name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from graphrun.graph.values import strings

ValueKind = Literal[
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

# kinds of plain values in graph files and inputs; other kinds only pass between stages
PLAIN_KINDS: frozenset[ValueKind] = frozenset({"str", "int", "float", "bool"})
# kinds of inputs that are files, or objects in Python; a plan depends on their size
MEDIA_KINDS: frozenset[ValueKind] = frozenset({"image", "mask", "video", "audio", "tensor"})
# the attribute of a function in which `op` stores its ``changes``
DECLARED = "__graphrun_op__"

Function = TypeVar("Function", bound=Callable[..., Mapping[str, Any]])


@dataclass(frozen=True, slots=True)
class Operation:
    """The signature of an op: ``required`` and ``optional`` arguments and ``outputs``, with kinds.

    ``options``: alternative ways to run the op -> what must be allowed, because the output changes;
    "" if it does not change. ``open``: the op has further arguments and outputs, of kind ``any``;
    the pipeline's class decides which, when the stage is planned. ``outlined``: arguments of which
    the op reads only shapes and dtypes.
    """

    name: str
    required: Mapping[str, ValueKind]
    optional: Mapping[str, ValueKind]
    outputs: Mapping[str, ValueKind]
    options: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    outlined: frozenset[str] = frozenset()

    @property
    def is_function(self) -> bool:
        return is_function(self.name)

    @property
    def arguments(self) -> dict[str, ValueKind]:
        """All arguments with their kinds, the required ones first."""
        return {**self.required, **self.optional}

    def argument(self, name: str) -> ValueKind | None:
        """Return the kind of the argument ``name``; None if there is none."""
        return self.arguments.get(name, "any" if self.open else None)

    def output(self, name: str) -> ValueKind | None:
        """Return the kind of the output ``name``; None if there is none."""
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


def is_function(name: str) -> bool:
    """Return whether the op ``name`` is a function of a package."""
    return ":" in name or "." in name


def operation(name: str) -> Operation | None:
    """Return the signature of the op ``name``; None if there is none.

    A function's signature is unknown until its package is imported: it accepts and returns
    anything; outputs named ``image``, ``video`` and ``audio`` have these kinds.
    """
    if is_function(name):
        return Operation(
            name, {}, {}, {"image": "image", "video": "video", "audio": "audio"}, open=True
        )
    return OPERATIONS.get(name)


def op(*, changes: Collection[str] = ()) -> Callable[[Function], Function]:
    """Mark a function as an op that stages may name: ``op: mypackage.mymodule:function``, or
    ``op: mypackage.name`` if an installed package has an entry point of this name.

    The function gets the stage's ``with:`` and ``uses:`` by name, the parts of the graph that it
    has a parameter for, and the device as ``device``. It returns its outputs by name; runs save
    ``image``, ``video`` and ``audio`` as files. ``changes``: arguments whose tensors the function
    changes in place; it gets copies of these, because other stages may read them too.

    Example:

        @graphrun.op()
        def flipped(image: Image) -> dict[str, Image]:
            return {"image": image.transpose(Transpose.FLIP_LEFT_RIGHT)}
    """

    def declare(function: Function) -> Function:
        setattr(function, DECLARED, frozenset(strings(changes)))
        return function

    return declare
