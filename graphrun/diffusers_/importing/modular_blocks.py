"""Stages of a modular pipeline: its top-level blocks, where a dry run shows that splitting there
changes nothing.

    FluxAutoBlocks    text_encoder --prompt_embeds, ...--> denoise --latents--> decode       blocks
    that ran for these inputs

    Blocks stay in one stage where
      - one enters no component (FLUX's `input` block joins its neighbour),
      - one reads a part whose state another changed (a scheduler's timesteps),
      - one passes another a value that is not a tensor, plain data or a picture.

Decides which blocks make a stage, and the source of each argument, by the values that the blocks'
own code reads of the pipeline state. Knows no YAML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from graphrun.diffusers_.importing.fingerprint import EntryRecord, digest_of
from graphrun.diffusers_.importing.layout import CallInputs, Layout, NotSplit, outputs_in, tried
from graphrun.diffusers_.importing.trial import TrialPipeline, few_steps
from graphrun.graph.graph import PLANNING_TEXT, Reference, Stage
from graphrun.ops.block import GENERATOR
from graphrun.ops.call import FIELDS
from graphrun.ops.diffusion import without_pictures
from graphrun.ops.modular import begun

# Names with a meaning of their own among a stage's arguments and outputs.
RESERVED_NAMES = frozenset({"blocks", "seed", *FIELDS})


@dataclass(slots=True)
class _BlockRun:
    """One block's run in a dry run.

    ``reads``: state values that it read, name -> number of the block that wrote it (None: an
    input). ``writes``: names that it wrote. ``entered``: the component entries. ``drew``: whether
    it drew random numbers. ``changed``: names of parts whose state it changed.
    """

    name: str
    reads: dict[str, int | None]
    writes: dict[str, None]
    entered: tuple[EntryRecord, ...] = ()
    drew: bool = False
    changed: frozenset[str] = frozenset()


class _TracedState(dict[str, Any]):
    """The values of a pipeline state, with a record of which block reads and writes them.

    The last of ``ran`` is the running block. ``unpassable``: (writer, reader) for values that a
    graph cannot pass between stages.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.ran: list[_BlockRun] = []
        self.writers: dict[str, int] = {}
        self.unpassable: list[tuple[int, int]] = []

    def __getitem__(self, name: str) -> Any:
        self._read(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As ``dict.get``, recorded as a read."""
        self._read(name)
        return super().get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.ran:
            self.writers[name] = len(self.ran) - 1
            self.ran[-1].writes[name] = None
        super().__setitem__(name, value)

    def _read(self, name: str) -> None:
        reader, writer = len(self.ran) - 1, self.writers.get(name)
        if reader < 0 or writer == reader:
            return
        self.ran[-1].reads.setdefault(name, writer)
        if (
            writer is not None
            and name != GENERATOR
            and (name in RESERVED_NAMES or not _is_passable(super().get(name)))
        ):
            self.unpassable.append((writer, reader))


def _is_passable(value: Any) -> bool:
    """Whether ``value`` can be passed between stages and cached: a tensor, plain data, a picture,
    or a container of these."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_passable(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_is_passable(item) for item in value)
    known = (bool, int, float, str, torch.Tensor, torch.dtype, np.ndarray, Image.Image)
    return value is None or isinstance(value, known)


def split_at_blocks(trial: TrialPipeline, call: CallInputs) -> Layout:
    """The stages of a modular pipeline. An input for which they differ from the whole call is left
    out.

    Raises NotSplit where it has to be one stage, ProbeError naming the call that failed.
    """
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    blocks = trial.pipeline._blocks
    if type(blocks).__call__ is not SequentialPipelineBlocks.__call__:
        raise NotSplit(f"{type(blocks).__name__} are not run one after another")
    observed = _trace_blocks(trial, call.arguments)
    groups = _group_blocks(observed, trial.pipeline)
    if len(groups) < 2:
        raise NotSplit(
            "its blocks pass each other values that a graph cannot hold, or only one block enters components"
        )
    made = {
        name: observed.get(name) for number in groups[-1] for name in observed.ran[number].writes
    }
    stages = _stages(observed.ran, groups, call, outputs_in(made))

    def home(name: str) -> str:
        """The first stage with a block that expects the component ``name``, else the last stage."""
        named = (
            s.name
            for s in stages
            for b in s.arguments["blocks"]
            if name in blocks.sub_blocks[b].component_names
        )
        return next(named, stages[-1].name)

    return tried(
        trial,
        call,
        stages,
        stages[-1].outputs,
        _trials(call),
        ("split at its blocks,", "values"),
        home,
    )


def _trace_blocks(trial: TrialPipeline, arguments: Mapping[str, Any]) -> _TracedState:
    """Runs the blocks of a call with ``arguments`` one after another, recording their reads and
    writes. Raises ProbeError."""
    generator = torch.Generator("cpu").manual_seed(0)
    given = {
        "num_inference_steps": few_steps(arguments.get("strength")),
        **arguments,
        GENERATOR: generator,
    }
    with trial.as_probe_errors(arguments), trial.fingerprint.running():
        pipeline, entries = trial.pipeline, trial.fingerprint.entries
        if "padding_mask_crop" not in arguments:
            without_pictures(pipeline)
        state = begun(pipeline, given, {})
        state.values = observed = _TracedState(state.values)
        for name, block in pipeline._blocks.sub_blocks.items():
            count, drawn, before = len(entries), generator.get_state(), _part_digests(pipeline)
            observed.ran.append(ran := _BlockRun(name, {}, {}))
            _, state = block(pipeline, state)
            ran.entered, ran.drew = (
                tuple(entries[count:]),
                not torch.equal(drawn, generator.get_state()),
            )
            ran.changed = frozenset(
                key for key, digest in _part_digests(pipeline).items() if digest != before[key]
            )
    return observed


def _part_digests(pipeline: Any) -> dict[str, str]:
    """Digests of the state of the pipeline's parts (a scheduler's timesteps), by part name."""
    return {
        name: digest_of(
            {key: value for key, value in vars(part).items() if key != "_internal_dict"}
        )
        for name, part in pipeline.components.items()
        if hasattr(part, "from_config") and not isinstance(part, torch.nn.Module)
    }


def _group_blocks(observed: _TracedState, pipeline: Any) -> list[list[int]]:
    """The block numbers of each stage. Blocks that were skipped in the dry run are in none."""
    ran, blocks = observed.ran, pipeline._blocks.sub_blocks
    groups = [[number] for number, each in enumerate(ran) if each.entered or each.writes]

    def join(one: int, other: int) -> None:
        middle = [group for group in groups if group[-1] >= one and group[0] <= other]
        groups[:] = sorted([*(g for g in groups if g not in middle), sum(middle, [])])

    for one, other in observed.unpassable:
        join(one, other)
    for one, each in enumerate(ran):
        for other in range(one + 1, len(ran)):
            expected = {spec.name for spec in blocks[ran[other].name].expected_components}
            if each.changed & expected and any(other in group for group in groups):
                join(one, other)
    while len(groups) > 1 and (
        idle := [g for g in groups if not any(ran[number].entered for number in g)]
    ):
        index = groups.index(idle[0])
        neighbour = groups[index + 1] if index + 1 < len(groups) else groups[index - 1]
        join(min(idle[0][0], neighbour[0]), max(idle[0][-1], neighbour[-1]))
    return groups


def _stages(
    ran: Sequence[_BlockRun],
    groups: Sequence[Sequence[int]],
    call: CallInputs,
    outputs: tuple[str, ...],
) -> list[Stage]:
    """A stage for each of ``groups``, named after its block with the most component entries. The
    last stage makes ``outputs``."""
    names: dict[int, str] = {}
    for group in groups:
        name = max(
            (ran[number] for number in group), key=lambda each: len(each.entered)
        ).name.replace(".", "_")
        names |= dict.fromkeys(group, f"{name}_block" if name in call.inputs else name)
    stages: list[Stage] = []
    drew: str | None = None
    for group in groups:
        arguments: dict[str, Any] = {"blocks": [ran[number].name for number in group]}
        for name, writer in ((n, w) for number in group for n, w in ran[number].reads.items()):
            if name == GENERATOR and drew is not None:
                arguments.setdefault(name, Reference("stage", drew, GENERATOR))
            elif name == GENERATOR and "seed" in call.passed:
                arguments.setdefault("seed", call.passed["seed"])
            elif writer is not None and writer not in group:
                arguments.setdefault(name, Reference("stage", names[writer], name))
            elif writer is None and name in call.passed:
                arguments.setdefault(name, call.passed[name])
        stages.append(Stage(names[group[0]], "block", (), arguments))
        drew = names[group[0]] if any(ran[number].drew for number in group) else drew
    read = [r for stage in stages for r in stage.references]
    read += [Reference("stage", stages[-1].name, name) for name in outputs]
    return [
        replace(
            s, outputs=tuple(dict.fromkeys(r.output for r in read if r.name == s.name and r.output))
        )
        for s in stages
    ]


def _trials(call: CallInputs) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The inputs of each trial, and what is left out where it differs: the defaults, a batch of
    two, a negative prompt.

    A prompt is the planning text, and media are those of ``call.arguments``.
    """
    values: dict[str, Any] = {}
    for name, entry in call.inputs.items():
        parameter = call.parameters.get(name, name)
        values[name] = (
            PLANNING_TEXT
            if parameter == "prompt"
            else entry.get("default", call.arguments.get(parameter))
        )
    few = few_steps(call.arguments.get("strength"))
    steps = {
        name: few
        for name, parameter in call.parameters.items()
        if parameter == "num_inference_steps"
    }
    yield values, ()
    for name, value in (("batch", 2), ("negative_prompt", "blurry")):
        if name in call.inputs:
            yield {**values, name: value, **steps}, (name,)
