"""The shape of a graph file as pydantic models: its keys and their types.

`loading` checks how the entries fit together. This module reads no files and has no line numbers.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from graphrun.graph.media import FASTEST_FPS, SLOWEST_FPS
from graphrun.graph.ops import OPERATIONS

# Names become parts of file names: at most 64 characters of POSIX's portable file name set, because
# suffixes are added and most file systems limit a name to 255 bytes.
_NAME, _GRAPH_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$", r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
_CLASS_PATH, _TEXT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$", r"^[^\x00-\x1f]+$"
_FILE_VARIANT = r"^[A-Za-z0-9_]+$"
_FUNCTION = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*[.:][A-Za-z_][A-Za-z0-9_]*"
_OP = rf"^([A-Za-z_][A-Za-z0-9_]*|{_FUNCTION})$"
_NO_NAME = "is not a name: letters, digits and underscores, at most 64, no digit first"
# end of a message about a text that does not match a pattern
PATTERNS = {
    _NAME: _NO_NAME,
    _FILE_VARIANT: _NO_NAME,
    _GRAPH_NAME: "cannot be a graph's name, since output files are named by it: letters, digits, "
    "dots, dashes and underscores, at most 64, no dot or dash first",
    _CLASS_PATH: "is not a class path such as diffusers.AutoencoderKL",
    _OP: "is neither an op nor a function such as mypackage.mymodule:sharpen",
    _TEXT: "has control characters",
}
Name = Annotated[str, StringConstraints(pattern=_NAME)]
GraphName = Annotated[str, StringConstraints(pattern=_GRAPH_NAME)]
ClassPath = Annotated[str, StringConstraints(pattern=_CLASS_PATH)]
Text = Annotated[str, StringConstraints(min_length=1, pattern=_TEXT)]
Scalar = str | bool | int | float
Dtype = Literal["bfloat16", "float16", "float32"]
Precision = Literal[
    "bfloat16", "float16", "float32", "fp8", "int8", "nf4", "int8wo", "fp8wo", "gguf"
]
Format = Literal[
    "fp8",
    "int8",
    "nf4",
    "Q4_0",
    "Q4_1",
    "Q4_K_S",
    "Q4_K_M",
    "Q5_0",
    "Q5_1",
    "Q5_K_S",
    "Q5_K_M",
    "Q6_K",
    "Q8_0",
    "svdq-int4",
    "svdq-fp4",
]
BackingStoreField = Literal["pinned", "pageable", "disk"]
StageChoiceField = Literal["tiling", "slicing", "tiling+slicing", "split"]
Config = Annotated[
    Text | dict[str, Any] | None,
    Field(
        description=(
            "A JSON file (path relative to the graph file), or the configuration itself. {}: "
            "the defaults."
        )
    ),
]
Argument = Scalar | None | list[Scalar | list[Scalar]] | dict[str, Scalar | list[Scalar]]
Measure = Annotated[int, Field(gt=0)] | Text
SourceField = Annotated[
    Text | None,
    Field(
        description=(
            "A repository on the Hugging Face hub (owner/name, owner/name@revision), a folder "
            "in diffusers' layout, or one safetensors file in the authors' layout."
        )
    ),
]
Revision = Annotated[
    Text | None,
    Field(description="A commit, branch or tag, as in owner/name@revision."),
]
FileVariant = Annotated[
    Annotated[str, StringConstraints(pattern=_FILE_VARIANT)] | None,
    Field(description="Which files of the source: fp16 reads model.fp16.safetensors."),
]


class Spec(BaseModel):
    """A strict model: no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: Any) -> Any:
        if value is None:
            raise PydanticCustomError("empty", "is empty; give it a value, or leave it out")
        return value


class InputSpec(Spec):
    """An input of a run, required unless it has a ``default`` or is ``optional``.

    An image, a mask, a video, audio or a tensor is given as a file, or in Python as an object.
    Plans do not need the file: they take its size from ``height``, ``width``, ``frames``, ``rate``
    and ``seconds``, which are numbers or inputs such as $height, and a tensor's from ``shape``.
    """

    type: Literal["str", "int", "float", "bool", "image", "mask", "video", "audio", "tensor"] = (
        Field(description="The type of the value. A tensor's file is safetensors.")
    )
    default: Scalar | None = Field(
        default=None,
        description="The value if a run gives none.",
    )
    optional: bool = Field(
        default=False,
        description="Whether a run may leave it out. The pipeline may then do something else.",
    )
    multiple_of: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="Refuse numbers that are not a multiple of this."
    )
    minimum: float | None = Field(default=None, description="The smallest accepted number.")
    maximum: float | None = Field(default=None, description="The largest accepted number.")
    accepts_list: bool = Field(
        alias="many",
        default=False,
        description="Whether a list of values is accepted too.",
    )
    height: Measure | None = Field(
        default=None, description="In pixels. Default: the input height."
    )
    width: Measure | None = Field(default=None, description="In pixels. Default: the input width.")
    frames: Measure | None = Field(
        default=None, description="Frames of a video. Default: the input frames or num_frames."
    )
    rate: Measure | None = Field(
        default=None, description="Audio samples per second. Files with another rate are refused."
    )
    seconds: Annotated[float, Field(gt=0)] | Text | None = Field(
        default=None, description="Length of audio. Default: the input seconds."
    )
    shape: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None, description="The shape of a tensor."
    )


class LoraSpec(Spec):
    """A LoRA that is fused into a component's weights when they are read."""

    file: Text = Field(
        description="A safetensors file in diffusers' layout (path relative to the graph file)."
    )
    scale: float = Field(default=1.0, description="The LoRA's weight.")


class IpAdapterSpec(Spec):
    """An IP-Adapter: image prompts (ip_adapter_image) for a UNet or a transformer."""

    file: Text = Field(
        description="A safetensors file in its authors' layout (path relative to the graph file)."
    )
    scale: float = Field(default=1.0, description="The weight of the image prompts.")


class CheckpointSpec(Spec):
    """A published checkpoint of a component in a quantized format."""

    source: Text = Field(
        description="A folder (owner/name/folder) or file (owner/name/file.gguf) of a repository."
    )
    revision: Revision = None
    bytes: int | None = Field(default=None, gt=0, description="Bytes of its files, from its page.")
    plain: list[Text] = Field(
        default_factory=list,
        description=(
            "Modules of the component that the file has in 16 bits or more, as whole paths: "
            "`proj_out` is not `blocks.0.proj_out`. Used for plans until the file is on this "
            "machine."
        ),
    )
    license: Text | None = Field(
        default=None, description="The checkpoint's license, with the address of its page."
    )


class ComponentSpec(Spec):
    """A module with weights, from a ``source`` of its own or from the graph's."""

    class_path: ClassPath = Field(
        alias="class", description="An importable class, such as diffusers.AutoencoderKL."
    )
    config: Config = None
    source: SourceField = None
    revision: Revision = None
    variant: FileVariant = None
    gguf: Text | None = Field(
        default=None,
        description="The GGUF file for precision gguf: a path, or owner/name/file.gguf.",
    )
    checkpoints: dict[Format, CheckpointSpec] = Field(
        default_factory=dict,
        description=(
            "Published checkpoints by format. Plans choose one with --allow FORMAT, or 4bit."
        ),
    )
    dtype: Dtype = Field(
        description=(
            "The dtype that the pipeline's code gets. Files in another dtype are converted "
            "when read."
        )
    )
    keep_fp32: bool = Field(
        default=True,
        description=(
            "false: modules that from_pretrained keeps in float32 have dtype too, as after "
            "pipe.to(dtype)."
        ),
    )
    precision: list[Precision] | None = Field(
        default=None,
        min_length=1,
        description="The first is the default. --allow permits the others.",
    )
    backing_store: list[BackingStoreField] | None = Field(
        default=None,
        min_length=1,
        description="Where the host copy may be. Default: anywhere.",
    )
    compile: Literal["blocks"] | None = Field(
        default=None,
        description="With --allow compile: each repeated block is compiled with torch.compile.",
    )
    loras: list[LoraSpec] = Field(
        default_factory=list, description="Fused into the weights, in this order."
    )
    ip_adapters: list[IpAdapterSpec] = Field(
        default_factory=list, description="Added to the component, in this order."
    )
    seed: int = Field(
        default=0, ge=0, description="The seed of random weights, if there is no source."
    )


class PartSpec(Spec):
    """An object without weights that the pipeline's code needs: a tokenizer, a scheduler."""

    class_path: ClassPath = Field(
        alias="class", description="An importable class, such as diffusers.DDIMScheduler."
    )
    config: Config = None
    source: SourceField = None
    file: Text | None = Field(
        default=None,
        description="A JSON file of the tokenizers library (path relative to the graph file).",
    )


class PipelineSpec(Spec):
    """A further pipeline, for stages that name it.

    It gets the graph's components and parts by name, like the graph's own pipeline.
    """

    class_path: ClassPath = Field(
        alias="class",
        description="A pipeline class, such as diffusers.StableDiffusionXLImg2ImgPipeline.",
    )
    config: dict[Name, Scalar | None | list[Scalar]] = Field(
        default={}, description="Like the graph's pipeline_config."
    )
    members: dict[Name, Name | None] = Field(
        default={},
        description=(
            "The pipeline's name for a component or part: the graph's name for it. null: the "
            "pipeline gets None."
        ),
    )


class StageSpec(Spec):
    """One op, its components, and its arguments: literals, ``$input`` or ``$stage.output``."""

    op: Annotated[
        Annotated[str, StringConstraints(pattern=_OP)],
        Field(
            json_schema_extra={
                "anyOf": [
                    {"enum": sorted(OPERATIONS)},
                    {"type": "string", "pattern": f"^{_FUNCTION}$"},
                ]
            },
            description=(
                "What runs: a part of the pipeline's call, the whole call (call), blocks of a "
                "modular pipeline (block), or a function of a trusted package: "
                "mypackage.mymodule:sharpen, or mypackage.sharpen by its entry point."
            ),
        ),
    ]
    pipeline: Name | None = Field(
        default=None, description="One of pipelines. Default: the graph's pipeline."
    )
    method: Name | None = Field(
        default=None,
        description=(
            "The method that op call calls, such as generate, if the class is no diffusers "
            "pipeline. Default: __call__."
        ),
    )
    uses: list[Name] = Field(default_factory=list, description="The components that the op calls.")
    arguments: dict[Name, Argument] = Field(
        alias="with",
        default_factory=dict,
        description=(
            "The op's arguments by name: literals, $input, $stage.output, or lists of these."
        ),
    )
    for_each: Name | None = Field(
        default=None,
        description=(
            "Run the stage once for each item of this argument; its outputs are lists. The "
            "argument is an input (many: true, or the frames of a video), or an output of "
            "another stage with for_each."
        ),
    )
    options: list[StageChoiceField] = Field(
        default_factory=list, description="Alternatives that a plan may choose."
    )


class DirectivesSpec(Spec):
    """Placement that every plan follows. The command line may add to it."""

    keep: list[Name] = Field(
        default_factory=list,
        description="Components that stay on the device from their first use to the end.",
    )
    pin: list[Name] = Field(
        default_factory=list, description="Components whose host copy is page-locked."
    )
    exclude: list[Name] = Field(
        default_factory=list,
        description="Components that are always streamed, with no block resident.",
    )
    reserve: Text | None = Field(
        default=None, description="Part of the VRAM budget to leave to other programs, such as 1G."
    )


class GraphSpec(Spec):
    """A graph file of graphrun: a diffusion pipeline as a DAG of stages."""

    graphrun: Literal[1] = Field(description="The version of this file format.")
    name: GraphName = Field(
        description="The name, also of output files: letters, digits, dots, dashes, underscores."
    )
    pipeline: ClassPath = Field(
        description="The pipeline class whose code the ops run, such as diffusers.FluxPipeline."
    )
    pipeline_config: dict[Name, Scalar | None | list[Scalar]] = Field(
        default={},
        description=(
            "Further constructor arguments. Lists may name components: [$canny, $depth]. If "
            "the class is no diffusers pipeline: attributes of its object, where $name is an "
            "object of pipelines."
        ),
    )
    pipelines: dict[Name, PipelineSpec] = Field(
        default_factory=dict,
        description="Further pipelines, such as a refiner. One plan covers all stages.",
    )
    source: SourceField = None
    revision: Revision = None
    variant: FileVariant = None
    license: Text | None = Field(
        default=None,
        description="The license of the source's weights, such as apache-2.0. It is only shown.",
    )
    fps: Annotated[float, Field(ge=SLOWEST_FPS, le=FASTEST_FPS)] | None = Field(
        default=None, description="Frames per second of saved videos."
    )
    code: Text | None = Field(
        default=None,
        description=(
            "Where to get packages that no package index has. It is only shown: users put "
            "the folder on PYTHONPATH and trust the packages."
        ),
    )
    allow: list[Name] | None = Field(
        default=None,
        description=(
            "All packages that classes come from. Default: diffusers, transformers. Users permit "
            "others with --trust-package NAME, not --allow."
        ),
    )
    inputs: dict[Name, InputSpec] = Field(default_factory=dict, description="The inputs of a run.")
    components: dict[Name, ComponentSpec] = Field(
        min_length=1, description="Modules with weights, under the pipeline's names."
    )
    parts: dict[Name, PartSpec] = Field(
        default_factory=dict,
        description="Objects without weights (tokenizers, schedulers), under the pipeline's names.",
    )
    stages: dict[Name, StageSpec] = Field(
        min_length=1,
        description="The steps of a run. A stage may use results of others, not in a circle.",
    )
    outputs: dict[Name, Text] = Field(
        min_length=1,
        description="What a run returns, as references such as $decode.image.",
    )
    directives: DirectivesSpec = Field(
        default_factory=DirectivesSpec, description="Placement that every plan must follow."
    )


def schema_text() -> str:
    """Return the JSON Schema of a graph file, for editors (``graphs/graphrun.schema.json``)."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **GraphSpec.model_json_schema(),
    }
    return json.dumps(schema, indent=2) + "\n"
