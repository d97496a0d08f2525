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
_FUNCTION = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
_OP = rf"^([A-Za-z_][A-Za-z0-9_]*|{_FUNCTION})$"
_NO_NAME = "is not a name: letters, digits and underscores, at most 64, no digit first"
# What a message says, after the text, about a text that does not match a pattern.
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
Precision = Literal["bfloat16", "float16", "float32", "fp8", "int8", "nf4", "gguf"]
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
]
BackingStoreField = Literal["pinned", "pageable", "disk"]
StageChoiceField = Literal["tiling", "slicing", "tiling+slicing", "split"]
Config = Annotated[
    Text | dict[str, Any] | None,
    Field(
        description="A JSON file, relative to the graph file, or the configuration itself; {} "
        "means the defaults."
    ),
]
Argument = Scalar | None | list[Scalar | list[Scalar]] | dict[str, Scalar | list[Scalar]]
Measure = Annotated[int, Field(gt=0)] | Text
SourceField = Annotated[
    Text | None,
    Field(
        description="A repository on the Hugging Face hub (owner/name, owner/name@revision), a "
        "local folder in the layout of diffusers, or one safetensors file in the original "
        "authors' layout."
    ),
]
Revision = Annotated[
    Text | None,
    Field(
        description="A commit, branch or tag of the source's repository; the same as "
        "owner/name@revision in source."
    ),
]
FileVariant = Annotated[
    Annotated[str, StringConstraints(pattern=_FILE_VARIANT)] | None,
    Field(description="Which files of a folder: fp16 reads model.fp16.safetensors."),
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
    """An input of a run. Without ``default`` it is required, unless it is ``optional``.

    An image, a mask, a video, audio or a tensor is a file, or in Python an object. Plans without
    the file are made for ``height``, ``width``, ``frames``, ``rate`` and ``seconds``, which are
    numbers or inputs such as $height; a tensor has a ``shape`` instead.
    """

    type: Literal["str", "int", "float", "bool", "image", "mask", "video", "audio", "tensor"] = (
        Field(
            description="The type of the value. An image, a mask, a video, audio or a tensor "
            "(safetensors) is a file, or in Python an object."
        )
    )
    default: Scalar | None = Field(
        default=None,
        description="The value for runs that give none; left out: required, unless optional.",
    )
    optional: bool = Field(
        default=False,
        description="Whether it may be left out; the pipeline may do something else without it.",
    )
    multiple_of: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="Numbers that are not a multiple of it are refused."
    )
    minimum: float | None = Field(default=None, description="Smaller numbers are refused.")
    maximum: float | None = Field(default=None, description="Larger numbers are refused.")
    accepts_list: bool = Field(
        alias="many",
        default=False,
        description="Whether a list of such values is accepted too.",
    )
    height: Measure | None = Field(default=None, description="Pixels; left out: the input height.")
    width: Measure | None = Field(default=None, description="Pixels; left out: the input width.")
    frames: Measure | None = Field(
        default=None, description="Frames of a video; left out: the input frames, or num_frames."
    )
    rate: Measure | None = Field(
        default=None, description="Samples of audio per second. A file of another rate is refused."
    )
    seconds: Annotated[float, Field(gt=0)] | Text | None = Field(
        default=None, description="Length of audio; left out: the input seconds."
    )
    shape: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None, description="The shape of a tensor."
    )


class LoraSpec(Spec):
    """A LoRA that is fused into a component's weights when they are read."""

    file: Text = Field(
        description="A safetensors file in diffusers' layout, relative to the graph file."
    )
    scale: float = Field(default=1.0, description="The factor of the LoRA's weight difference.")


class IpAdapterSpec(Spec):
    """An IP-Adapter: image prompts (ip_adapter_image) for a UNet or a transformer."""

    file: Text = Field(
        description="A safetensors file as its authors publish it, relative to the graph file."
    )
    scale: float = Field(default=1.0, description="The weight of the image prompts.")


class CheckpointSpec(Spec):
    """A published checkpoint of a component, in a quantized format."""

    source: Text = Field(
        description="A folder of a repository (owner/name/folder), or a file in one "
        "(owner/name/file.gguf)."
    )
    revision: Revision = None
    bytes: int | None = Field(
        default=None, gt=0, description="Bytes of its files, as its page states them."
    )
    plain: list[Text] = Field(
        default_factory=list,
        description="Modules that the file keeps in 16 bits or more; a plan assumes so until the "
        "file is on this machine.",
    )
    license: Text | None = Field(
        default=None, description="The checkpoint's licence, with the address of its page."
    )


class ComponentSpec(Spec):
    """A module with weights. ``source`` is its own folder; the graph's is a pipeline's."""

    class_path: ClassPath = Field(
        alias="class", description="An importable class, such as diffusers.AutoencoderKL."
    )
    config: Config = None
    source: SourceField = None
    revision: Revision = None
    variant: FileVariant = None
    gguf: Text | None = Field(
        default=None,
        description=(
            "The GGUF file that precision gguf is read from: a path, or owner/name/file.gguf."
        ),
    )
    checkpoints: dict[Format, CheckpointSpec] = Field(
        default_factory=dict,
        description="Published checkpoints by format, each of which a plan may choose with --allow "
        "FORMAT, 4bit or 8bit.",
    )
    dtype: Dtype = Field(
        description="The dtype of the weights for the pipeline's code; files in another dtype are "
        "converted when read."
    )
    precision: list[Precision] | None = Field(
        default=None,
        min_length=1,
        description="The first is the default; --allow permits the others.",
    )
    backing_store: list[BackingStoreField] | None = Field(
        default=None,
        min_length=1,
        description="The kinds of memory that may hold the master copy; default: any.",
    )
    compile: Literal["blocks"] | None = Field(
        default=None,
        description=(
            "With --allow compile, its repeated blocks are compiled (torch.compile), each by "
            "itself."
        ),
    )
    loras: list[LoraSpec] = Field(
        default_factory=list, description="Fused into the weights, in this order."
    )
    ip_adapters: list[IpAdapterSpec] = Field(
        default_factory=list, description="Added to the component, in this order."
    )
    seed: int = Field(
        default=0, ge=0, description="The seed of random weights, for a component without a source."
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
        description="A tokenizer of the tokenizers library (JSON), relative to the graph file.",
    )


class PipelineSpec(Spec):
    """A further pipeline, which stages name.

    It takes the graph's components and parts by their names, like the graph's own pipeline.
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
            "The pipeline's name for a component or part, with the graph's name; null: the "
            "pipeline gets none."
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
            description="What runs: a part of the pipeline's call, the whole call (call), blocks "
            "of a modular pipeline (block), or a function of a trusted package, such as "
            "mypackage.mymodule:sharpen.",
        ),
    ]
    pipeline: Name | None = Field(
        default=None, description="The further pipeline it belongs to; left out: the graph's own."
    )
    method: Name | None = Field(
        default=None,
        description=(
            "The method that a call stage calls, such as generate, if the class is no pipeline "
            "of diffusers; left out: __call__."
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
        description="The argument whose list is processed item by item: the stage runs once for "
        "each item. The list is an input (many: true, or the frames of a video), or an output of "
        "another stage with for_each. The stage's outputs are lists.",
    )
    options: list[StageChoiceField] = Field(
        default_factory=list, description="Alternatives that a plan may choose."
    )


class DirectivesSpec(Spec):
    """Placement that every plan must follow. The command line may add to it."""

    keep: list[Name] = Field(
        default_factory=list,
        description="Components that stay on the device from their first use to the end.",
    )
    pin: list[Name] = Field(
        default_factory=list, description="Components whose master copy is in page-locked memory."
    )
    exclude: list[Name] = Field(
        default_factory=list, description="Components that are always streamed, with no block kept."
    )
    reserve: Text | None = Field(
        default=None, description="A part of the VRAM budget left to other programs, such as 1G."
    )


class GraphSpec(Spec):
    """A graph file of graphrun: a diffusion pipeline as a DAG of stages."""

    graphrun: Literal[1] = Field(description="The version of this file format.")
    name: GraphName = Field(
        description="Also names its output files: letters, digits, dots, dashes, underscores."
    )
    pipeline: ClassPath = Field(
        description="The pipeline class whose code the ops run, such as diffusers.FluxPipeline."
    )
    pipeline_config: dict[Name, Scalar | None | list[Scalar]] = Field(
        default={},
        description="More constructor arguments of the pipeline; they may be lists, also of "
        "components such as [$canny, $depth]. For a class that is no pipeline of diffusers: "
        "attributes of its object; $name is an object described in pipelines.",
    )
    pipelines: dict[Name, PipelineSpec] = Field(
        default_factory=dict,
        description="Further pipelines, such as a refiner. One plan covers all stages.",
    )
    source: SourceField = None
    revision: Revision = None
    variant: FileVariant = None
    license: Text | None = Field(
        default=None, description="The license of the source's weights, for people: apache-2.0."
    )
    fps: Annotated[float, Field(ge=SLOWEST_FPS, le=FASTEST_FPS)] | None = Field(
        default=None, description="Frames per second of saved videos."
    )
    code: Text | None = Field(
        default=None,
        description="For people: where to get packages that no package index has. It grants "
        "nothing: users put the folder on PYTHONPATH themselves, and trust the packages.",
    )
    allow: list[Name] | None = Field(
        default=None,
        description="Packages that classes come from, in place of diffusers and transformers. "
        "This only requests them: users permit their code with --trust-package NAME.",
    )
    inputs: dict[Name, InputSpec] = Field(
        default_factory=dict, description="The inputs of a run, by name."
    )
    components: dict[Name, ComponentSpec] = Field(
        min_length=1, description="Modules with weights, by the pipeline's names for them."
    )
    parts: dict[Name, PartSpec] = Field(
        default_factory=dict,
        description="Objects without weights (tokenizers, schedulers), by the pipeline's names.",
    )
    stages: dict[Name, StageSpec] = Field(
        min_length=1, description="The steps of a run. Their references form the DAG."
    )
    outputs: dict[Name, Text] = Field(
        min_length=1,
        description="What a run returns: names, each with a reference such as $decode.image.",
    )
    directives: DirectivesSpec = Field(
        default_factory=DirectivesSpec, description="Placement that every plan must follow."
    )


def schema_text() -> str:
    """Return the JSON Schema of a graph file, for editors.

    It is stored in ``graphs/graphrun.schema.json``.
    """
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **GraphSpec.model_json_schema(),
    }
    return json.dumps(schema, indent=2) + "\n"
