"""Other engines: what to type for a budget, and what they do then.

`ENGINES` is the one registry, for ``graphrun export`` and ``graphrun compare``. An engine has

    choices    placements of components by kind, of which one per kind is taken; several
               dictionaries exclude each other. The fastest that fits is the engine's best setting
    modes      in place of choices: diffusers' own modes (`graphrun.profile.modes`)
    command    what to type for a setting
    expresses  what of a plan it can be asked for, of `FEATURES`
    caveat     what its estimate leaves out

Whether an engine has the model is not checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from graphrun.graph.graph import Graph
from graphrun.model.hardware import Hardware
from graphrun.modules.source_files import split_source
from graphrun.profile.modes import MODES, Mode, ModeName, estimate_mode
from graphrun.profile.placements import PARTIAL_KINDS, Scene, WeightPlacement
from graphrun.reading import is_url
from graphrun.units import GIB

RESIDENT = WeightPlacement()
SWAPPED, SWAPPED_BY_GROUP = WeightPlacement("swapped"), WeightPlacement("swapped", leaves="group")
STREAMED, STREAMED_BESIDE = WeightPlacement("streamed", rest="stage"), WeightPlacement("streamed")
DROPPED = WeightPlacement("swapped", copies_back=False)
DROPPED_BY_GROUP = WeightPlacement("swapped", leaves="group", copies_back=False)
LAZY = WeightPlacement("streamed", rest="use")
SEGMENTED = WeightPlacement("segmented", rest="stage")
HOOKED, HOOKED_WHOLE = WeightPlacement("hooked"), WeightPlacement("hooked", rest="call")

FEATURES: Mapping[str, str] = {
    "budget": "a budget: a run that needs more memory fails",
    "blocks": "which blocks stay on the device: {0}",
    "precision": "formats that the plan chose: {0}",
    "disk": "weights that stay on disk: all of them are in RAM",
    "devices": "a second device: {0}",
    "cpu": "computing on the CPU: {0}",
    "tiling": "tiles of the VAE",
    "options": "options of stages: {0}",
    "session": "the order of loads from run to run",
}
"""What a plan may have and an engine may lack, as a sentence about what is lost."""

Budgets = tuple[int, int]
"""Bytes of VRAM and of RAM."""
PER_CENT = 99  # sglang reads 1 as one block
SD_CPP_MARGIN_BYTES = 512 * 2**20
"""What stable-diffusion.cpp leaves free, and a quarter of the budget, before blocks stay."""

_FILES = {  # class of transformers -> option of sd.cpp
    "CLIPTextModel": "--clip_l",
    "CLIPTextModelWithProjection": "--clip_g",
    "T5EncoderModel": "--t5xxl",
    "UMT5EncoderModel": "--t5xxl",
}


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """A way to run an engine, and its estimate. ``mode``: of diffusers, in place of placements.

    ``seconds``: of a warm run. ``peak_bytes``: as nvidia-smi counts. ``ram_bytes``: of weights.
    ``fits``: within the budgets. ``share``: of the denoiser's blocks that stays, if it was asked
    for as a share.
    """

    placements: Mapping[str, WeightPlacement]
    mode: ModeName | None
    seconds: float
    peak_bytes: int
    ram_bytes: int
    fits: bool
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What an engine is asked for. ``kinds``: of the components. ``on_cpu``: components that the
    plan computes there."""

    graph: Graph
    hardware: Hardware
    budget_bytes: int
    kinds: Mapping[str, str]
    setting: EngineSetting
    on_cpu: Collection[str] = ()
    tiling: bool = False

    def placement(self, kind: str) -> WeightPlacement:
        """Return the placement of the components of ``kind``."""
        placements = self.setting.placements.items()
        return next((p for name, p in placements if self.kinds[name] == kind), RESIDENT)

    def has(self, kind: str) -> bool:
        return kind in self.kinds.values()


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """An engine. ``source``: the version whose parser takes its lines, and the parser's files.

    ``stays``: how it is asked for blocks that stay: as the ``first`` of a component, or as a
    ``share`` of each block group. ``margin_bytes``: of a budget, the bytes that it leaves free
    where blocks stay. Other fields: see the module.
    """

    name: str
    source: str
    command: Callable[[Wish], list[str]]
    expresses: frozenset[str] = frozenset()
    choices: tuple[Mapping[str, tuple[WeightPlacement, ...]], ...] = ()
    modes: tuple[ModeName, ...] = ()
    stays: str = ""
    margin_bytes: Callable[[int], int] = lambda _: 0
    caveat: str = ""


def kind_of(name: str) -> str:
    """Return the kind of the component ``name``, by the names that diffusers gives components."""
    if name.startswith("text_encoder") or name.endswith("text_encoder"):
        return "text_encoder"
    if name.endswith("image_encoder"):
        return "image_encoder"
    if "vae" in name or name.endswith(("movq", "vqgan")):
        return "vae"
    return "dit" if name.startswith(("transformer", "unet", "prior", "decoder")) else "other"


def best_setting(engine: Engine, scene: Scene, budgets: Budgets) -> EngineSetting:
    """Return the fastest setting of ``engine`` that fits; if none does, the one of least memory."""
    settings = [*_mode_settings(engine, scene, budgets)]
    for choices in engine.choices:
        kinds = list(dict.fromkeys(scene.kinds.values()))
        for combination in product(*(choices.get(kind, (RESIDENT,)) for kind in kinds)):
            by_kind = dict(zip(kinds, combination, strict=True))
            placements = {name: by_kind[kind] for name, kind in scene.kinds.items()}
            settings.append(_with_kept_blocks(engine, scene, placements, budgets))
    fitting_settings = [setting for setting in settings if setting.fits]
    if fitting_settings:
        return min(fitting_settings, key=lambda setting: (setting.seconds, setting.peak_bytes))
    return min(settings, key=lambda setting: setting.peak_bytes)


def _mode_settings(engine: Engine, scene: Scene, budgets: Budgets) -> Iterator[EngineSetting]:
    budget_bytes, ram_bytes = budgets
    for name in engine.modes:
        mode = Mode(name, ram_bytes=ram_bytes)
        estimate = estimate_mode(scene.graph, scene.dry_run, scene.hardware, mode, scene.weights)
        peak_bytes = scene.peak_bytes(estimate)
        seconds = sum(estimate.seconds.values())
        yield EngineSetting({}, name, seconds, peak_bytes, 0, peak_bytes <= budget_bytes)


def _with_kept_blocks(
    engine: Engine, scene: Scene, placements: Mapping[str, WeightPlacement], budgets: Budgets
) -> EngineSetting:
    """Return ``placements`` with their estimate, and as many kept blocks of denoisers as fit."""
    partial = [
        name
        for name, placement in placements.items()
        if scene.kinds[name] == "dit" and placement.kind in PARTIAL_KINDS
    ]
    if not engine.stays or not partial:
        return setting_of(scene, placements, budgets)
    groups = [
        len(group.blocks) for group in scene.dry_run.profiles[partial[0]].groups if group.streamable
    ]
    low, high = 0, sum(groups) if engine.stays == "first" else PER_CENT
    block_budgets = budgets[0] - engine.margin_bytes(budgets[0]), budgets[1]
    best = setting_of(scene, placements, budgets)
    while best.fits and low < high:  # more blocks take more memory
        middle = (low + high + 1) // 2
        partial_placements = {
            name: replace(placements[name], blocks=_kept_counts(engine, groups, middle))
            for name in partial
        }
        setting = setting_of(scene, {**placements, **partial_placements}, block_budgets)
        setting = replace(setting, share=middle / 100 if engine.stays == "share" else 0.0)
        low, high = (middle, high) if setting.fits else (low, middle - 1)
        best = setting if setting.fits else best
    return best


def _kept_counts(engine: Engine, groups: Sequence[int], number: int) -> tuple[int, ...]:
    """Return the blocks of each group that stay: the first ``number``, or that per cent of each."""
    if engine.stays == "share":
        return tuple(int(number / 100 * count) for count in groups)
    counts = list[int]()
    for count in groups:
        counts.append(min(count, number - sum(counts)))
    return tuple(counts)


def setting_of(
    scene: Scene, placements: Mapping[str, WeightPlacement], budgets: Budgets
) -> EngineSetting:
    """Return ``placements`` of all components with their estimate."""
    estimate = scene.estimate(placements)
    host_bytes = sum(
        scene.weights[name] for name, placement in placements.items() if placement != RESIDENT
    )
    peak_bytes = scene.peak_bytes(estimate)
    fits = peak_bytes <= budgets[0] and host_bytes <= budgets[1]
    seconds = sum(estimate.seconds.values())
    return EngineSetting(placements, None, seconds, peak_bytes, host_bytes, fits)


# -- what to type


def _model(graph: Graph, option: str) -> list[str]:
    """Return the words that name the model of ``graph``; ``option``: before its repository."""
    source = graph.source
    if source is None or is_url(source):
        source = "MODEL"
    if source == "MODEL" or source.startswith("/"):
        return [option, source] if option else [source]
    repository, revision, _ = split_source(source)
    words = [option, repository] if option else [repository]
    return [*words, "--revision", revision] if revision else words


def _sglang(wish: Wish) -> list[str]:
    dit, texts = wish.placement("dit"), wish.placement("text_encoder")
    words = ["sglang", "serve", *_model(wish.graph, "--model-path"), "--performance-mode", "manual"]
    words += ["--dit-layerwise-offload", _truth(dit.kind == "streamed")]
    words += ["--dit-cpu-offload", _truth(dit.kind == "swapped")]
    if any(dit.blocks):
        words += ["--dit-layerwise-resident-layers", f"{wish.setting.share:.2f}"]
    words += ["--text-encoder-cpu-offload", _truth(texts.kind == "swapped")]
    if texts.kind == "streamed":
        words += ["--layerwise-offload-components", "text_encoder"]
    if wish.has("image_encoder"):
        is_swapped = wish.placement("image_encoder").kind == "swapped"
        words += ["--image-encoder-cpu-offload", _truth(is_swapped)]
    return [*words, "--vae-cpu-offload", _truth(wish.placement("vae").kind == "swapped")]


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _vllm_omni(wish: Wish) -> list[str]:
    words = ["vllm", "serve", *_model(wish.graph, ""), "--omni"]
    places = {kind: wish.placement(kind) for kind in ("dit", "text_encoder")}
    chosen_kinds = [kind for kind, placement in places.items() if placement != RESIDENT]
    if chosen_kinds:
        is_layer = any(placement.kind == "streamed" for placement in places.values())
        config: dict[str, object] = {
            "mode": "layer" if is_layer else "module",
            "components": chosen_kinds,
        }
        if blocks := sum(places["dit"].blocks):
            config["layer_options"] = {"dit": {"resident_layers": blocks}}
        words += ["--diffusion-offload-config", json.dumps(config, separators=(",", ":"))]
    return [*words, "--vae-use-tiling"] if wish.tiling else words


def _sd_cpp(wish: Wish) -> list[str]:
    words = ["sd-cli"]
    for name, component in wish.graph.components.items():
        kind, file = wish.kinds[name], component.source or ""
        option = {"dit": "--diffusion-model", "vae": "--vae"}.get(kind)
        if kind == "text_encoder":
            option = _FILES.get(component.class_path.rpartition(".")[2], "--llm")
        if option is not None and option not in words:
            is_file = file.endswith((".safetensors", ".gguf"))
            words += [option, file.rpartition("/")[2] if is_file else f"{name}.safetensors"]
    overhead_bytes = wish.hardware.context_bytes + wish.hardware.workspace_bytes
    managed_gib = max(0.01, (wish.budget_bytes - overhead_bytes) / GIB)  # 0 means no limit
    words += ["--max-vram", f"{math.floor(100 * managed_gib) / 100:.2f}", "--diffusion-fa"]
    placements = wish.setting.placements
    if any(placement != RESIDENT for placement in placements.values()):
        words += ["--params-backend", "*=cpu"]
    words += ["--stream-layers"] if wish.placement("dit").kind == "segmented" else []
    cpu_kinds = {wish.kinds[name] for name in wish.on_cpu}
    backends = [
        f"{module}=cpu"
        for kind, module in (("text_encoder", "te"), ("vae", "vae"), ("dit", "diffusion"))
        if kind in cpu_kinds
    ]
    words += ["--backend", ",".join(backends)] if backends else []
    words += ["--vae-tiling"] if wish.tiling else []
    return [*words, "--prompt", "PROMPT"]


def _comfyui(wish: Wish) -> list[str]:
    words = ["python", "main.py"]
    left_bytes = wish.hardware.capacity_bytes - wish.budget_bytes
    if left_bytes > 0 and wish.hardware.kind.free_memory != "none":
        size = f"{math.ceil(100 * left_bytes / GIB) / 100:.2f}"
        # the first counts where ComfyUI estimates what fits, the second with its dynamic VRAM
        words += ["--reserve-vram", size, "--vram-headroom", size]
    is_vae_on_cpu = any(wish.kinds[name] == "vae" for name in wish.on_cpu)
    return [*words, "--cpu-vae"] if is_vae_on_cpu else words


def _diffusers(wish: Wish) -> list[str]:
    calls = {
        "resident": 'pipe.to("cuda")',
        "model": "pipe.enable_model_cpu_offload()",
        "sequential": "pipe.enable_sequential_cpu_offload()",
        "group": 'pipe.enable_group_offload(torch.device("cuda"), offload_type="block_level", '
        "num_blocks_per_group=1, use_stream=True)",
        "leaf": 'pipe.enable_group_offload(torch.device("cuda"), offload_type="leaf_level", '
        "use_stream=True)",
    }
    return [calls[wish.setting.mode or "resident"]]


def _accelerate(wish: Wish) -> list[str]:
    places = {
        name: placement
        for name, placement in wish.setting.placements.items()
        if placement != RESIDENT
    }
    parts = [
        f'{name}: {sum(placement.blocks)} blocks on 0, the others on "cpu"'
        if placement.rest == "always"
        else f'{name}: {{"": "cpu"}}'
        for name, placement in places.items()
    ]
    return ["dispatch_model", *(f"{part};" for part in parts)] if parts else ["pipe.to(0)"]


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "diffusers",
            "diffusers 0.42, as installed",
            _diffusers,
            frozenset({"precision", "tiling"}),
            modes=MODES,
        ),
        Engine(
            "accelerate",
            "accelerate 1.15, as installed",
            _accelerate,
            frozenset({"blocks", "precision", "disk", "devices", "cpu", "tiling"}),
            choices=(
                {
                    "dit": (RESIDENT, HOOKED),
                    "text_encoder": (RESIDENT, HOOKED_WHOLE),
                    "image_encoder": (RESIDENT, HOOKED_WHOLE),
                    "vae": (RESIDENT, HOOKED_WHOLE),
                },
            ),
            stays="first",
        ),
        Engine(
            "sglang",
            "sglang 0.5.23, multimodal_gen/runtime/server_args/server_args.py",
            _sglang,
            frozenset({"blocks"}),
            choices=(
                {
                    "dit": (RESIDENT, SWAPPED, STREAMED),
                    "text_encoder": (RESIDENT, SWAPPED, STREAMED),
                    "image_encoder": (RESIDENT, SWAPPED),
                    "vae": (RESIDENT, SWAPPED),
                },
            ),
            stays="share",
        ),
        Engine(
            "vllm-omni",
            "vllm-omni 0.30.0, entrypoints/cli/serve.py and diffusion/offloader/config.py",
            _vllm_omni,
            frozenset({"blocks", "tiling"}),
            choices=(
                dict.fromkeys(("dit", "text_encoder"), (RESIDENT, SWAPPED_BY_GROUP)),
                dict.fromkeys(("dit", "text_encoder"), (RESIDENT, STREAMED_BESIDE)),
            ),
            stays="first",
        ),
        Engine(
            "sd.cpp",
            "stable-diffusion.cpp 97d2990807fe6d558e395f8764198d7c7e7b411c (2026-08-19), "
            "examples/common/common.cpp",
            _sd_cpp,
            frozenset({"budget", "cpu", "tiling"}),
            choices=(
                {},
                {
                    "dit": (DROPPED, SEGMENTED),
                    "text_encoder": (DROPPED, SEGMENTED),
                    "image_encoder": (DROPPED,),
                    "vae": (DROPPED,),
                },
            ),
            stays="first",
            margin_bytes=lambda budget_bytes: SD_CPP_MARGIN_BYTES + budget_bytes // 4,
            caveat="ggml's own kernels",
        ),
        Engine(
            "comfyui",
            "ComfyUI 0.33.0, comfy/cli_args.py",
            _comfyui,
            frozenset({"budget"}),
            choices=(
                {},
                {
                    "dit": (LAZY,),
                    "text_encoder": (LAZY,),
                    "image_encoder": (LAZY,),
                    "vae": (DROPPED_BY_GROUP,),
                },
            ),
            stays="first",
            caveat="what it keeps for the next run",
        ),
    )
}
