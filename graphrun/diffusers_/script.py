"""Export of a plan as a plain Python script that loads, runs and frees components per stage.

For each component the script uses the closest function of diffusers or accelerate; its docstring
lists the differences from the plan.

    whole component on the device   .to(DEVICE), then del after its stage
    streamed component              group offloading, by blocks; by leaves if the module has no
                                    block list of diffusers
    component of the decode stage   accelerate's cpu_offload_with_hook: copied at its first call

With device maps (`accelerate_script`), every component is dispatched by its map instead.
"""

from __future__ import annotations

import inspect
import pprint
from collections.abc import Iterator, Mapping
from typing import Any

from graphrun.diffusers_.device_map import Maps
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component, Part, Reference
from graphrun.graph.precisions import is_gguf, planned_only_reason
from graphrun.model.plan import Evict, Stream, blocks_text
from graphrun.model.problem import Variant
from graphrun.model.solution import Solution
from graphrun.modules.classes import resolve_class
from graphrun.modules.source_files import local_place, split_source
from graphrun.ops.diffusion import returned_names
from graphrun.profile.placements import WeightPlacement
from graphrun.reading import is_url
from graphrun.units import show_seconds, show_size

EXPORTED_OPS = ("encode_prompt", "denoise", "decode")


def diffusers_script(graph: Graph, solution: Solution) -> str:
    """Return the text of the script; ``python script.py [device] [file]`` writes the picture.

    ``graph``: of ``solution``. Raises InputError unless the graph's stages are one encode_prompt,
    one denoise and one decode, or if its weights are random.
    """
    return _Script(graph, solution).text()


def accelerate_script(graph: Graph, solution: Solution, maps: Maps) -> str:
    """Return the text of the script that dispatches components by ``maps``, as `diffusers_script`
    does."""
    return _DispatchScript(graph, solution, maps).text()


def script_placements(graph: Graph, solution: Solution) -> dict[str, WeightPlacement]:
    """Return how `diffusers_script` holds each component, to estimate it."""
    return _Script(graph, solution).placements()


class _Script:
    imports: tuple[str, ...] = (
        "from accelerate import cpu_offload_with_hook",
        "from diffusers.hooks import apply_group_offloading",
    )
    title = "plain diffusers calls"

    def __init__(self, graph: Graph, solution: Solution) -> None:
        self.graph, self.problem, self.plan, self.simulation = (
            graph,
            solution.problem,
            solution.plan,
            solution.simulation,
        )
        ops = [stage.op for stage in graph.stages]
        if ops != list(EXPORTED_OPS) or self.problem.precomputed or graph.pipelines:
            raise InputError(
                f"only {', '.join(EXPORTED_OPS)} in a row can be exported as diffusers calls; "
                f"this plan has {', '.join(ops)}"
            )
        self.encode, self.denoise, self.decode = graph.stages
        self.pipeline: Any = resolve_class(graph.pipeline, graph.trust, graph.file_line, "pipeline")
        self.variants = {component.name: component.variants[0] for component in solution.components}
        self.inputs = graph.for_planning(dict(self.problem.settings))
        if random := [
            name
            for name in self.variants
            if graph.component(name).source_in(self.variants[name].precision) is None
        ]:
            raise InputError(
                f"{', '.join(random)}: random weights are graphrun's own; give the graph a "
                "source to export its plan"
            )

    def text(self) -> str:
        encoder_names = [name for name in self.variants if name in self.encode.uses]
        other_names = [name for name in self.variants if name not in self.encode.uses]
        lines = ['"""' + "\n".join(self._losses()), '"""', ""]
        lines += [
            "import gc",
            "import sys",
            "",
            "import diffusers",
            "import torch",
            "import transformers",
        ]
        lines += [*self.imports, ""]
        lines += ['DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")']
        lines += [f'OUTPUT = sys.argv[2] if len(sys.argv) > 2 else "{self.graph.name}.png"']
        lines += [f"INPUTS = {pprint.pformat(self.inputs, width=100, sort_dicts=False)}", ""]
        lines += [line for part in self.graph.parts.values() for line in self._part(part)]
        lines += [
            "",
            f"# {self.encode.name}",
            *self._load(encoder_names, "encode"),
            *self._pipeline(encoder_names),
            *self._encode_call(),
        ]
        lines += [
            f"del {', '.join(('pipe', *encoder_names))}",
            "gc.collect()",
            "if torch.cuda.is_available():",
        ]
        lines += ["    torch.cuda.empty_cache()", "", f"# {self.denoise.name}, {self.decode.name}"]
        lines += [
            *self._load(other_names, "remaining"),
            *self._pipeline(other_names),
            *self._options(),
            *self._pipeline_call(),
        ]
        return "\n".join(lines) + "\n"

    def _losses(self) -> Iterator[str]:
        yield (
            f"{self.graph.name}: the closest {self.title} to plan {self.plan.digest} of graphrun."
        )
        yield ""
        peak = show_size(self.simulation.peak_bytes)
        yield (
            f"The plan takes {show_seconds(self.simulation.seconds)} and {peak} at most, by its "
            "own simulation."
        )
        yield "Neither number holds for this script. What the plan does and these calls do not:"
        yield "- no budget: a component that does not fit raises torch.OutOfMemoryError"
        for name, variant in self.variants.items():
            if (stream := self._stream(name)) is not None:
                groups = {
                    group.name: len(group.blocks) for group in self.problem.component(name).groups
                }
                kept_blocks = (
                    "all blocks"
                    if stream.keep is None
                    else ", ".join(f"{len(i)} of {groups[k]} {k}" for k, i in stream.keep)
                )
                yield (
                    f"- {name}: {kept_blocks or 'no blocks'} stay on the device, the staging "
                    f"ring buffer holds {show_size(stream.ring_buffer_bytes)}"
                )
            if variant.backing_store == "disk":
                yield (
                    f"- {name}: its weights are read from disk block by block, and are never all "
                    "in RAM"
                )
            elif variant.backing_store == "pinned":
                yield (
                    f"- {name}: its backing store is pinned memory, read from disk while earlier "
                    "phases compute"
                )
            if variant.secondary:
                yield (
                    f"- {name}: computes on {variant.device}, a further device; here it runs on "
                    "the first"
                )
            for _, secondary, blocks in (split for split in self.plan.splits if split[0] == name):
                yield (
                    f"- {name}: {blocks_text(blocks)} compute on device{secondary}, a further "
                    "device; here they run on the first"
                )
            for _, secondary in (copy for copy in self.plan.copies if copy[0] == name):
                yield (
                    f"- {name}: a copy on device{secondary} makes half of the calls; here {name} "
                    "makes all of them"
                )
            if variant.device == "cpu":
                yield f"- {name}: runs on the CPU; here it runs on the device"
        evicting_phases = {
            slot.phase
            for slot in self.plan.slots
            if slot.phase and any(isinstance(action, Evict) for action in slot.actions)
        }
        if evicting_phases:
            yield (
                f"- components evicted before {', '.join(sorted(evicting_phases))}: here whole "
                "components are freed after their stage"
            )
        yield (
            f"- {self.decode.name} as a stage of its own: here it is the end of the pipeline "
            "call that denoises"
        )
        if self.plan.further_slots:
            yield "- the session: further runs that reuse what the first left on the device"

    def placements(self) -> dict[str, WeightPlacement]:
        """Return how the script holds each component on the device."""
        return {
            name: WeightPlacement("streamed", rest="call")
            if self._stream(name) is not None
            else WeightPlacement(
                "swapped",
                leaves="stage" if name in self.encode.uses else "end",
                copies_back=False,
            )
            for name in self.variants
        }

    def _stream(self, name: str) -> Stream | None:
        """Return the component's last `Stream` action, which covers most of its calls, or None."""
        actions = [
            action
            for slot in self.plan.slots
            for action in slot.actions
            if isinstance(action, Stream) and action.component == name
        ]
        return actions[-1] if actions else None

    def _part(self, part: Part) -> Iterator[str]:
        if part.file is not None:
            yield (
                f"{part.name} = "
                f"transformers.PreTrainedTokenizerFast(tokenizer_file={str(part.file)!r}, "
                f"**{part.config!r})"
            )
        elif part.has_config:
            kind = resolve_class(part.class_path, self.graph.trust, part.file_line, "part")
            constructor_call = (
                f"from_config({part.config!r})"
                if hasattr(kind, "from_config")
                else f"__call__(**{part.config!r})"
            )
            yield f"{part.name} = {part.class_path}.{constructor_call}"
        else:
            trust_argument = (
                ", trust_remote_code=False" if part.class_path.startswith("transformers.") else ""
            )
            yield (
                f"{part.name} = "
                f"{part.class_path}.from_pretrained({_source_arguments(part.source or '')}"
                f"{trust_argument})"
            )

    def _load(self, names: list[str], stage: str) -> Iterator[str]:
        for name in names:
            component, variant = self.graph.component(name), self.variants[name]
            yield from self._construct(component, variant)
            yield from self._place(component, stage)

    def _place(self, component: Component, stage: str) -> Iterator[str]:
        """Yield the lines that place ``component``, which is loaded for ``stage``."""
        name = component.name
        if self._stream(name) is not None:
            yield from self._group_offload(component)
        elif stage == "remaining" and name in self.decode.uses and name not in self.denoise.uses:
            yield f"{name}, _ = cpu_offload_with_hook({name}, DEVICE)"
        else:
            yield f"{name}.to(DEVICE)"

    def _construct(self, component: Component, variant: Variant) -> Iterator[str]:
        name, precision = component.name, variant.precision
        if reason := planned_only_reason({name: precision}):
            raise InputError(reason)
        dtype = precision if precision in ("float32", "bfloat16", "float16") else component.dtype
        options = [f"torch_dtype=torch.{dtype}"]
        source = component.source_in(precision) or ""
        if precision in ("int8", "nf4"):
            kind = "diffusers" if component.class_path.startswith("diffusers.") else "transformers"
            four_bit_arguments = (
                'load_in_4bit=True, bnb_4bit_quant_type="nf4", '
                f"bnb_4bit_compute_dtype=torch.{dtype}"
            )
            bits_arguments = "load_in_8bit=True" if precision == "int8" else four_bit_arguments
            options.append(f"quantization_config={kind}.BitsAndBytesConfig({bits_arguments})")
        if is_gguf(precision):
            options.append(
                f"quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.{dtype})"
            )
        if source.endswith((".safetensors", ".gguf")):
            if not hasattr(
                resolve_class(
                    component.class_path, self.graph.trust, component.file_line, "component"
                ),
                "from_single_file",
            ):
                raise InputError(
                    f"{name}: {component.class_path} has no from_single_file; give it a folder "
                    "as its source to export the plan"
                )
            yield (
                "# without config= (a folder or repository with this component's config.json) "
                "diffusers guesses it from the file"
            )
            yield (
                f"{name} = {component.class_path}.from_single_file({_source_arguments(source)}, "
                f"{', '.join(options)})"
            )
        else:
            options += [f"variant={component.variant!r}"] if component.variant else []
            yield (
                f"{name} = {component.class_path}.from_pretrained({_source_arguments(source)}, "
                f"{', '.join(options)})"
            )
        yield f"{name}.eval()"
        for lora in component.loras:
            yield f"# the plan has this LoRA fused; load it by hand: {lora.file} x {lora.scale}"
        if precision == "fp8":
            yield (
                f"{name}.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, "
                f"compute_dtype=torch.{dtype})"
            )

    def _group_offload(self, component: Component) -> Iterator[str]:
        """Yield the lines that offload a component by blocks, or by leaves: by blocks for models of
        diffusers other than VAEs, which do not call them one by one."""
        kind = resolve_class(
            component.class_path, self.graph.trust, component.file_line, "component"
        )
        by_blocks = hasattr(kind, "enable_group_offload") and not hasattr(kind, "decode")
        level = '"block_level", num_blocks_per_group=1' if by_blocks else '"leaf_level"'
        yield (
            f"apply_group_offloading({component.name}, onload_device=DEVICE, offload_type={level},"
        )
        yield '                       use_stream=DEVICE.type == "cuda")'

    def _pipeline(self, names: list[str]) -> Iterator[str]:
        parameters = {
            n: p
            for n, p in inspect.signature(self.pipeline.__init__).parameters.items()
            if n not in ("self", "kwargs")
        }
        arguments = {name: name for name in parameters if name in names or name in self.graph.parts}
        arguments |= {
            name: "None"
            for name in parameters
            if name in self.graph.components and name not in names
        }
        arguments |= {name: repr(value) for name, value in self.graph.pipeline_config.items()}
        required = [
            name for name, parameter in parameters.items() if parameter.default is parameter.empty
        ]
        arguments |= {name: "None" for name in required if name not in arguments}
        yield f"pipe = {self.graph.pipeline}({_arguments_text(arguments)})"

    def _options(self) -> Iterator[str]:
        for stage, name in self.plan.options:
            if name in ("tiling", "slicing") and stage == self.decode.name:
                yield f"pipe.vae.enable_{name}()"
            elif name != "plain":
                yield f"# {stage}: the plan runs it with {name}, which diffusers has no call for"

    def _encode_call(self) -> Iterator[str]:
        call_parameters, encode_parameters = (
            inspect.signature(method).parameters
            for method in (self.pipeline.__call__, self.pipeline.encode_prompt)
        )
        stage_arguments = {
            name: self._value(value) for name, value in self.encode.arguments.items()
        }
        scale, true_scale = (
            self._resolved_argument(name) for name in ("guidance_scale", "true_cfg_scale")
        )
        images = stage_arguments.get("num_images", "1")
        argument_texts = {
            **{
                n: repr(p.default)
                for n, p in call_parameters.items()
                if p.default is not p.empty and p.default is not None
            },
            **{
                "device": "DEVICE",
                "num_images_per_prompt": images,
                "num_videos_per_prompt": images,
            },
            **({} if scale is None else {"do_classifier_free_guidance": repr(scale > 1)}),
            **stage_arguments,
        }
        required = {
            n: "None"
            for n, p in encode_parameters.items()
            if p.default is p.empty and n not in ("self", "kwargs")
        }
        suffixes = ("", "_2") if "text_encoder_index" in encode_parameters else ("",)
        names = returned_names(self.pipeline.encode_prompt)
        yield "embeds = {}"
        yield "with torch.no_grad():"
        embed_names: list[str] = []
        for index, suffix in enumerate(suffixes):
            argument_texts["text_encoder_index"] = repr(index)
            calls = [
                {
                    **required,
                    **{n: text for n, text in argument_texts.items() if n in encode_parameters},
                }
            ]
            if (
                "negative_prompt" not in encode_parameters
                and "negative_prompt" in stage_arguments
                and true_scale is not None
                and true_scale > 1
            ):
                calls.append({**calls[0], "prompt": stage_arguments["negative_prompt"]})
            for number, arguments in enumerate(calls):
                keys = [f"{'negative_' if number else ''}{name}{suffix}" for name in names]
                embed_names += [key for key in keys if key in call_parameters]
                yield f"    found = pipe.encode_prompt({_arguments_text(arguments)})"
                yield (
                    f"    embeds |= dict(zip({keys!r}, found if isinstance(found, tuple) else "
                    "(found,)))"
                )
        yield (
            f"embeds = {{name: embeds[name] for name in {embed_names!r} if embeds[name] is not "
            f"None}}"
        )

    def _pipeline_call(self) -> Iterator[str]:
        parameters = inspect.signature(self.pipeline.__call__).parameters
        stage_arguments = {**self.decode.arguments, **self.denoise.arguments}
        seed = self._value(stage_arguments.pop("seed", 0))
        arguments = {name: "None" for name in ("prompt", "negative_prompt") if name in parameters}
        arguments |= {
            "num_inference_steps" if n == "steps" else n: self._value(v)
            for n, v in stage_arguments.items()
        }
        arguments |= {"generator": f'torch.Generator("cpu").manual_seed({seed})'}
        excluded_names = ("embeds", "latents", "num_images", "tiling")
        arguments_text = _arguments_text(
            {
                n: text
                for n, text in arguments.items()
                if n in parameters and n not in excluded_names
            }
        )
        yield f"images = pipe(**embeds, {arguments_text}, return_dict=False)[0]"
        yield "first = images[0]"
        yield "if isinstance(first, list):"
        yield "    diffusers.utils.export_to_gif(first, OUTPUT)"
        yield "else:"
        yield "    first.save(OUTPUT)"

    def _value(self, value: Any) -> str:
        """Return an argument as Python source: a literal, or the input that it refers to."""
        if isinstance(value, Reference):
            return f"INPUTS[{value.name!r}]" if value.kind == "input" else value.output
        return repr(value)

    def _resolved_argument(self, name: str) -> Any:
        value = self.encode.arguments.get(name)
        return (
            self.inputs[value.name]
            if isinstance(value, Reference) and value.kind == "input"
            else value
        )


class _DispatchScript(_Script):
    imports = ("from accelerate import cpu_offload, dispatch_model",)
    title = "device maps of accelerate"

    def __init__(self, graph: Graph, solution: Solution, maps: Maps) -> None:
        super().__init__(graph, solution)
        self.maps = maps

    def _place(self, component: Component, stage: str) -> Iterator[str]:
        name, places = component.name, self.maps[component.name]
        if set(places.values()) == {0}:
            yield f"{name}.to(DEVICE)"
        elif set(places.values()) == {"cpu"}:  # dispatch_model does not take such a map
            yield f"cpu_offload({name}, DEVICE, offload_buffers=True)"
        else:
            yield f"{name}_map = {pprint.pformat(dict(places), width=100, sort_dicts=False)}"
            yield (
                f"dispatch_model({name}, {{path: DEVICE if place == 0 else place for path, place "
                f"in {name}_map.items()}},"
            )
            yield (
                f'               main_device=DEVICE, offload_dir="offload/{name}", '
                f'offload_buffers=True, skip_keys=getattr({name}, "_skip_keys", None), '
                "force_hooks=True)"
            )


def _source_arguments(source: str) -> str:
    """Return the arguments of ``from_pretrained`` or ``from_single_file`` for ``source``."""
    if source.startswith("/") or is_url(source):
        return repr(str(local_place(source) or source))
    repository, revision, inner_path = split_source(source)
    if inner_path.endswith((".safetensors", ".gguf")):
        return repr(f"https://huggingface.co/{repository}/blob/{revision or 'main'}/{inner_path}")
    options = {
        **({"subfolder": inner_path} if inner_path else {}),
        **({"revision": revision} if revision else {}),
    }
    return ", ".join([repr(repository), *(f"{key}={value!r}" for key, value in options.items())])


def _arguments_text(arguments: Mapping[str, str]) -> str:
    """Return the keyword arguments of a call as Python source."""
    return ", ".join(f"{name}={text}" for name, text in arguments.items())
