"""Stages of a modular pipeline: its top-level blocks, if a dry run shows equal results.

    FluxAutoBlocks   text_encoder --prompt_embeds, ...--> denoise --latents--> decode

Two blocks stay in one stage if - one of them calls no component (FLUX's `input` block joins its
neighbour), - one reads a part whose state the other changed (a scheduler's timesteps), - one passes
the other a value that is not a tensor, plain data or a picture.

This module decides which blocks make a stage, and the source of each argument, from the values of
the pipeline state that the blocks' own code reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from graphrun.diffusers_.importing.fingerprint import ComponentCall, digest_of
from graphrun.diffusers_.importing.layout import (
    CallInputs,
    GraphLayout,
    NotSplit,
    checked_layout,
    outputs_in,
)
from graphrun.diffusers_.importing.trial import TrialPipeline
from graphrun.graph.graph import PLANNING_TEXT
from graphrun.graph.parts import Reference, Stage
from graphrun.ops.block import GENERATOR
from graphrun.ops.call import FIELDS
from graphrun.ops.diffusion import without_pictures
from graphrun.ops.modular import initial_state

# names with a fixed meaning among a stage's arguments and outputs
RESERVED_NAMES = frozenset({"blocks", "seed", *FIELDS})


@dataclass(slots=True)
class _BlockRun:
    """The run of one block in a dry run.

    ``reads``: by name of each state value read, the number of the block that wrote it (None: an
    input). ``writes``: names of the state values written. ``component_calls``: calls into
    components. ``has_drawn``: it drew random numbers. ``changed_parts``: names of the parts whose
    state it changed.
    """

    name: str
    reads: dict[str, int | None]
    writes: dict[str, None]
    component_calls: tuple[ComponentCall, ...] = ()
    has_drawn: bool = False
    changed_parts: frozenset[str] = frozenset()


class _TracedState(dict[str, Any]):
    """The values of a pipeline state, recording which block reads and writes them.

    ``block_runs``: the last item is the running block. ``unpassable``: (writer, reader) of values
    that a graph cannot pass between stages.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.block_runs: list[_BlockRun] = []
        self.writers: dict[str, int] = {}
        self.unpassable: list[tuple[int, int]] = []

    def __getitem__(self, name: str) -> Any:
        self._read(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read(name)
        return super().get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.block_runs:
            self.writers[name] = len(self.block_runs) - 1
            self.block_runs[-1].writes[name] = None
        super().__setitem__(name, value)

    def _read(self, name: str) -> None:
        reader, writer = len(self.block_runs) - 1, self.writers.get(name)
        if reader < 0 or writer == reader:
            return
        self.block_runs[-1].reads.setdefault(name, writer)
        if (
            writer is not None
            and name != GENERATOR
            and (name in RESERVED_NAMES or not _is_passable(super().get(name)))
        ):
            self.unpassable.append((writer, reader))


def _is_passable(value: Any) -> bool:
    """Return whether ``value`` can pass between stages and be cached. This holds for tensors, plain
    data, pictures, and containers of these."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_passable(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_is_passable(item) for item in value)
    passable_types = (bool, int, float, str, torch.Tensor, torch.dtype, np.ndarray, Image.Image)
    return value is None or isinstance(value, passable_types)


def split_at_blocks(trial: TrialPipeline, call: CallInputs) -> GraphLayout:
    """Return the stages of a modular pipeline.

    Inputs for which the stages differ from the whole call are omitted. Raises NotSplit if the
    pipeline must be one stage, ProbeError naming the call that failed.
    """
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    blocks = trial.pipeline._blocks
    if type(blocks).__call__ is not SequentialPipelineBlocks.__call__:
        raise NotSplit(f"{type(blocks).__name__} are not run one after another")
    traced_state = _trace_blocks(trial, call.arguments)
    groups = _group_blocks(traced_state, trial.pipeline)
    if len(groups) < 2:
        raise NotSplit(
            "its blocks pass each other values that a graph cannot hold, or only one block "
            "enters components"
        )
    values = {
        name: traced_state.get(name)
        for number in groups[-1]
        for name in traced_state.block_runs[number].writes
    }
    stages = _stages(traced_state.block_runs, groups, call, outputs_in(values))

    def stage_of(name: str) -> str:
        """Return the first stage that expects component ``name``, else the last stage."""
        stage_names = (
            s.name
            for s in stages
            for b in s.arguments["blocks"]
            if name in blocks.sub_blocks[b].component_names
        )
        return next(stage_names, stages[-1].name)

    return checked_layout(
        trial,
        call,
        stages,
        stages[-1].outputs,
        _trials(trial, call),
        ("split at its blocks", "values"),
        stage_of,
    )


def _trace_blocks(trial: TrialPipeline, arguments: Mapping[str, Any]) -> _TracedState:
    """Run the blocks of a call with ``arguments`` in order, recording their reads and writes.
    Raises ProbeError."""
    generator = torch.Generator("cpu").manual_seed(0)
    inputs = {
        **trial.few_steps(arguments.get("strength")),
        **arguments,
        GENERATOR: generator,
    }
    with trial.as_probe_errors(arguments), trial.fingerprint.record_run():
        pipeline, component_calls = trial.pipeline, trial.fingerprint.component_calls
        if "padding_mask_crop" not in arguments:
            without_pictures(pipeline)
        state = initial_state(pipeline, inputs, {})
        state.values = traced_state = _TracedState(state.values)
        for name, block in pipeline._blocks.sub_blocks.items():
            count, generator_state, previous_digests = (
                len(component_calls),
                generator.get_state(),
                _part_digests(pipeline),
            )
            traced_state.block_runs.append(block_run := _BlockRun(name, {}, {}))
            _, state = block(pipeline, state)
            block_run.component_calls, block_run.has_drawn = (
                tuple(component_calls[count:]),
                not torch.equal(generator_state, generator.get_state()),
            )
            block_run.changed_parts = frozenset(
                key
                for key, digest in _part_digests(pipeline).items()
                if digest != previous_digests[key]
            )
    return traced_state


def _part_digests(pipeline: Any) -> dict[str, str]:
    """Return digests of the state of the pipeline's parts (a scheduler's timesteps), by name."""
    return {
        name: digest_of(
            {key: value for key, value in vars(part).items() if key != "_internal_dict"}
        )
        for name, part in pipeline.components.items()
        if hasattr(part, "from_config") and not isinstance(part, torch.nn.Module)
    }


def _group_blocks(traced_state: _TracedState, pipeline: Any) -> list[list[int]]:
    """Return the block numbers of each stage, without blocks that the dry run skipped."""
    block_runs, blocks = traced_state.block_runs, pipeline._blocks.sub_blocks
    groups = [
        [number]
        for number, block_run in enumerate(block_runs)
        if block_run.component_calls or block_run.writes
    ]

    def join(first: int, last: int) -> None:
        middle = [group for group in groups if group[-1] >= first and group[0] <= last]
        groups[:] = sorted([*(g for g in groups if g not in middle), sum(middle, [])])

    for writer, reader in traced_state.unpassable:
        join(writer, reader)
    for writer, block_run in enumerate(block_runs):
        for reader in range(writer + 1, len(block_runs)):
            expected = {spec.name for spec in blocks[block_runs[reader].name].expected_components}
            if block_run.changed_parts & expected and any(reader in group for group in groups):
                join(writer, reader)
    while len(groups) > 1 and (
        idle_groups := [
            g for g in groups if not any(block_runs[number].component_calls for number in g)
        ]
    ):
        index = groups.index(idle_groups[0])
        neighbour = groups[index + 1] if index + 1 < len(groups) else groups[index - 1]
        join(min(idle_groups[0][0], neighbour[0]), max(idle_groups[0][-1], neighbour[-1]))
    return groups


def _stages(
    block_runs: Sequence[_BlockRun],
    groups: Sequence[Sequence[int]],
    call: CallInputs,
    outputs: tuple[str, ...],
) -> list[Stage]:
    """Return a stage per group, named after its block with the most calls into components. The last
    stage computes ``outputs``."""
    names: dict[int, str] = {}
    for group in groups:
        name = max(
            (block_runs[number] for number in group),
            key=lambda block_run: len(block_run.component_calls),
        ).name.replace(".", "_")
        names |= dict.fromkeys(group, f"{name}_block" if name in call.inputs else name)
    stages: list[Stage] = []
    drawing_stage: str | None = None
    for group in groups:
        arguments: dict[str, Any] = {"blocks": [block_runs[number].name for number in group]}
        for name, writer in (
            (n, w) for number in group for n, w in block_runs[number].reads.items()
        ):
            if name == GENERATOR and drawing_stage is not None:
                arguments.setdefault(name, Reference("stage", drawing_stage, GENERATOR))
            elif name == GENERATOR and "seed" in call.references:
                arguments.setdefault("seed", call.references["seed"])
            elif writer is not None and writer not in group:
                arguments.setdefault(name, Reference("stage", names[writer], name))
            elif writer is None and name in call.references:
                arguments.setdefault(name, call.references[name])
        stages.append(Stage(names[group[0]], "block", (), arguments))
        drawing_stage = (
            names[group[0]]
            if any(block_runs[number].has_drawn for number in group)
            else drawing_stage
        )
    references = [reference for stage in stages for reference in stage.references]
    references += [Reference("stage", stages[-1].name, name) for name in outputs]
    return [
        replace(
            s,
            outputs=tuple(
                dict.fromkeys(r.output for r in references if r.name == s.name and r.output)
            ),
        )
        for s in stages
    ]


def _trials(
    trial: TrialPipeline, call: CallInputs
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield each trial: (inputs, names to leave out if the stages differ from the whole call).

    The trials are the defaults, a batch of two, and a negative prompt. A prompt is the planning
    text; media come from ``call.arguments``.
    """
    values: dict[str, Any] = {}
    for name, entry in call.inputs.items():
        parameter = call.parameters.get(name, name)
        values[name] = (
            PLANNING_TEXT
            if parameter == "prompt"
            else entry.get("default", call.arguments.get(parameter))
        )
    few_steps = trial.few_steps(call.arguments.get("strength"))
    reduced_steps = {
        name: few_steps[parameter]
        for name, parameter in call.parameters.items()
        if parameter in few_steps
    }
    yield values, ()
    for name, value in (("batch", 2), ("negative_prompt", "blurry")):
        if name in call.inputs:
            yield {**values, name: value, **reduced_steps}, (name,)
