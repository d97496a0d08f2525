"""The signatures of the ops, as data: what a stage may pass to an op, and what it gets back.

Decides which arguments and outputs exist and of which kind they are. Must not know how an op works: that is `graphrun.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Kind = Literal["str", "int", "float", "bool", "embeds", "latents", "image", "mask", "video", "audio", "any"]

# Kinds that are written in a graph file or given to a run; the others only flow from stage to stage.
PLAIN_KINDS: frozenset[Kind] = frozenset({"str", "int", "float", "bool"})
# Kinds that a run is given as a file, or in Python as an object. What a plan depends on is their size.
MEDIA_KINDS: frozenset[Kind] = frozenset({"image", "mask", "video", "audio"})


@dataclass(frozen=True, slots=True)
class Operation:
    """What a stage that names this op must pass (``required``), may pass (``optional``) and produces (``outputs``).

    ``options``: other ways to run it -> what must be allowed for it since the output changes ("": nothing does). ``open``: it takes
    and produces more, of kind ``any``; what there is says the pipeline's class, which is asked when the stage is planned.
    ``outlined``: arguments of which it takes shapes and dtypes and no number.
    """

    name: str
    required: Mapping[str, Kind]
    optional: Mapping[str, Kind]
    outputs: Mapping[str, Kind]
    options: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    outlined: frozenset[str] = frozenset()

    @property
    def arguments(self) -> dict[str, Kind]:
        """Every argument with its kind, the required ones first."""
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
        optional={"height": "int", "width": "int", "num_frames": "int", "use_resolution_binning": "bool", "tiling": "bool"},
        outputs={"image": "image"},
        options={"tiling": "tiling", "slicing": ""},
        outlined=frozenset({"embeds"}),
    ),
    Operation(
        "call",
        required={},
        optional={"seed": "int"},
        outputs={"image": "image", "video": "video", "audio": "audio", "latents": "latents"},
        options={"tiling": "tiling", "slicing": ""},
        open=True,
    ),
    Operation(
        "block",
        required={},
        optional={"blocks": "any", "seed": "int"},
        outputs={"image": "image", "video": "video", "audio": "audio"},
        options={"tiling": "tiling", "slicing": ""},
        open=True,
    ),
)
