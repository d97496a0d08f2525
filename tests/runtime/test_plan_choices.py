"""Choices of a plan on whole pipelines: backing stores, precisions, CPU, stage order, spills,
LoRAs. The output is unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaign import sampled
from safetensors.torch import save_file
from whole_pipelines import GRAPHS, pixels, plain_image

from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Adapter
from graphrun.model.choices import apply_choices
from graphrun.model.plan import Plan, Restore, Slot, Spill, Stream
from graphrun.model.problem import Problem
from graphrun.modules.build import build
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import execute
from graphrun.runtime.spool import PREFIX, Spool
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.solve.strategies import without
from graphrun.trace import Trace
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

AMPLE = 1 << 40
INPUTS = {"seed": 3, "steps": 2, "height": 64, "width": 64}


class Case:
    """A graph, what diffusers makes of it, and its dry run."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.inputs = graph, graph.resolve(INPUTS)
        self.modules = {
            name: build(component, graph) for name, component in graph.components.items()
        }
        self.dry_run = probe(graph, self.inputs)

    def image(self) -> Any:
        return pixels(plain_image(self.graph, self.modules, self.inputs))

    def within(self, budget_bytes: int, graph: Graph | None = None, **limits: Any) -> Problem:
        problem_limits = ProblemLimits(budget_bytes, limits.pop("ram_bytes", AMPLE), **limits)
        problem = problem_of(
            graph or self.graph, self.dry_run, simulated(), problem_limits, self.inputs
        )
        return replace(
            problem, components=tuple(replace(c, layers=None) for c in problem.components)
        )

    def tight(self, graph: Graph | None = None, **limits: Any) -> Problem:
        return self.within(int(1.1 * smallest_budget(self.within(AMPLE, graph))), graph, **limits)


@pytest.fixture(scope="module")
def flux() -> Case:
    return Case(load(GRAPHS / "flux-tiny.yaml"))


@pytest.fixture(scope="module")
def image(flux: Case) -> Any:
    return flux.image()


@pytest.fixture(scope="module")
def stored_graph(flux: Case, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """The graph with its weights in folders, the transformer's in shards."""
    folder = tmp_path_factory.mktemp("source")
    for name, module in flux.modules.items():
        module.save_pretrained(folder / name, max_shard_size="2MB")  # type: ignore[operator]
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    components = {
        name: replace(c, source=str(folder / name)) for name, c in flux.graph.components.items()
    }
    return replace(flux.graph, components=components)


def run(problem: Problem, plan: Plan, graph: Graph, inputs: Any) -> Trace:
    device = open_device(problem)
    trace = execute(solution_of(problem, plan), graph, inputs, device)
    assert device.allocated_bytes == 0
    simulation = simulate(problem, plan)
    assert trace.host_bytes <= simulation.host_peak_bytes
    for slot, actual in trace.pairs_with(simulation.slots):
        assert actual.peak_bytes <= slot.peak_bytes
    assert not trace.notes
    return trace


def choosing(problem: Problem, backing_store: str) -> Problem:
    """``problem`` with components in ``backing_store`` alone."""
    variants = {
        c.name: tuple(v for v in c.variants if v.backing_store == backing_store)
        for c in problem.components
    }
    return replace(
        problem, components=tuple(replace(c, variants=variants[c.name]) for c in problem.components)
    )


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("backing_store", ["pinned", "pageable", "disk"])
def test_weights_in_shards_are_read_as_planned_into_every_backing_store(
    flux: Case, image: Any, stored_graph: Graph, backing_store: str
) -> None:
    problem = choosing(flux.tight(stored_graph, pinned_bytes=AMPLE), backing_store)
    plan = solve(problem).plan
    trace = run(problem, plan, stored_graph, flux.inputs)
    assert np.array_equal(pixels(trace.outputs["image"]), image)
    assert {event.component for event in trace.events if event.kind in ("fetch", "read")} == set(
        flux.graph.components
    )
    assert trace.seconds == pytest.approx(simulate(problem, plan).seconds, rel=0.05)


def test_a_component_may_compute_on_the_cpu(flux: Case, image: Any) -> None:
    problem = flux.tight(allow=("cpu",))
    on_cpu = {
        c.name: c.variants[-1:] if c.name == "text_encoder" else c.variants[:1]
        for c in problem.components
    }
    problem = replace(
        problem, components=tuple(replace(c, variants=on_cpu[c.name]) for c in problem.components)
    )
    plan = solve(problem).plan
    trace = run(problem, plan, flux.graph, flux.inputs)
    assert np.array_equal(pixels(trace.outputs["image"]), image)
    assert not [
        e for e in trace.events if e.kind in ("load", "stream") and e.component == "text_encoder"
    ]
    assert trace.seconds == pytest.approx(simulate(problem, plan).seconds, rel=0.1)


@pytest.mark.filterwarnings("ignore:.*has rows of.*in nf4:RuntimeWarning")
@pytest.mark.parametrize("precision", sampled(["nf4", "int8", "fp8"], ["int8"], "precisions"))
def test_a_quantized_component_is_read_and_computes_as_planned(
    flux: Case, stored_graph: Graph, precision: str
) -> None:
    transformer = replace(stored_graph.components["transformer"], precision=(precision,))
    graph = replace(
        stored_graph, components={**stored_graph.components, "transformer": transformer}
    )
    problem = choosing(flux.tight(graph, pinned_bytes=AMPLE), "pinned")
    plan = solve(problem).plan
    trace = execute(solution_of(problem, plan), graph, flux.inputs, open_device(problem))
    simulation = simulate(problem, plan)
    for slot, actual in trace.pairs_with(simulation.slots):
        assert actual.end_seconds - actual.start_seconds == pytest.approx(
            slot.seconds, rel=0.05, abs=1e-4
        )
    folders = [Path(str(component.source)) for component in stored_graph.components.values()]
    files_bytes = sum(
        file.stat().st_size for folder in folders for file in folder.glob("*.safetensors")
    )
    assert sum(slot.disk_bytes_read for slot in simulation.slots) == pytest.approx(
        files_bytes, rel=0.05
    )
    assert trace.disk_bytes_read == pytest.approx(files_bytes, rel=0.02), (
        "the files hold 16 bits, whatever is made of them"
    )


@pytest.mark.parametrize(
    "precision",
    sampled(["nf4", "int8", "fp8", "float16", "float32"], ["nf4", "float16"], "precisions"),
)
def test_a_precision_streamed_is_that_precision_resident(flux: Case, precision: str) -> None:
    pictures, streams = [], []
    for problem in (flux.within(AMPLE), flux.tight()):
        # this dry run's bytes are bfloat16's
        wider = 2 if precision in ("float16", "float32") else 1
        problem = _in_precision(problem, precision, wider)
        plan = solve(problem).plan
        trace = execute(solution_of(problem, plan), flux.graph, flux.inputs, open_device(problem))
        pictures.append(pixels(trace.outputs["image"]))
        streams.append(
            {a.component for slot in plan.slots for a in slot.actions if isinstance(a, Stream)}
        )
        assert all(tier.left_bytes == 0 for tier in trace.tiers)
    assert "transformer" in streams[1] - streams[0]
    assert np.array_equal(*pictures)


def _in_precision(problem: Problem, precision: str, wider: int) -> Problem:
    """``problem`` where all but the VAE have ``precision``, in ``wider`` times the bytes."""
    components = []
    for c in problem.components:
        v = c.variants[0]
        sizes, host = tuple(wider * b for b in v.block_bytes), wider * v.host_bytes
        variant = (
            replace(v, precision=precision, block_bytes=sizes, host_bytes=host)
            if c.name != "vae"
            else v
        )
        components.append(replace(c, variants=(variant,)))
    phases = tuple(
        replace(p, first_bytes=2 * p.first_bytes, steady_bytes=2 * p.steady_bytes)
        for p in problem.phases
    )
    new_problem = replace(problem, components=tuple(components), phases=phases)
    if problem.budget_bytes < AMPLE:
        new_problem = replace(new_problem, budget_bytes=smallest_budget(new_problem) + 200_000)
    return new_problem


def test_random_weights_with_a_backing_store_on_disk_are_written_once_and_removed(
    flux: Case, image: Any, tmp_path: Path
) -> None:
    problem = flux.tight()
    components = []
    for c in problem.components:
        v = c.variants[0]
        read_seconds = tuple(b / problem.hardware.disk_bytes_per_second for b in v.block_bytes)
        disk = replace(
            v,
            backing_store="disk",
            host_bytes=2 * max(v.block_bytes),
            disk_seconds=read_seconds,
            stored_bytes=v.host_bytes,
        )
        components.append(replace(c, variants=(disk,)))
    problem = replace(problem, components=tuple(components))
    plan = solve(problem).plan
    device, spool = open_device(problem), Spool(tmp_path)
    host = Host.of_graph(flux.graph, apply_choices(problem, plan), device, spool=spool)
    files = sorted(path.name for path in tmp_path.glob(f"{PREFIX}*/*.safetensors"))
    assert files == sorted(f"{name}.safetensors" for name in flux.graph.components)
    for _ in range(2):
        trace = execute(solution_of(problem, plan), flux.graph, flux.inputs, device, host=host)
        assert np.array_equal(pixels(trace.outputs["image"]), image)
    spool.close()
    assert not list(tmp_path.iterdir())


TWICE = """
  other: {op: encode_prompt, uses: [text_encoder, text_encoder_2], with: {prompt: a storm, max_sequence_length: 16}}
"""  # noqa: E501


@pytest.fixture
def twice_graph(tmp_path: Path) -> Graph:
    """FLUX that encodes two prompts before it denoises the first: ``encode.embeds`` waits during a
    stage that does not read it."""
    for name in ("configs", "tokenizers"):
        (tmp_path / name).symlink_to(GRAPHS / name)
    lines = []
    for line in (GRAPHS / "flux-tiny.yaml").read_text().splitlines():
        if line.startswith("  denoise:"):
            lines += TWICE.strip("\n").splitlines()
        lines.append(line)
        if line.startswith("outputs:"):
            lines[-1] = line.replace("{", "{other: $other.embeds, ", 1)
    (tmp_path / "graph.yaml").write_text("\n".join(lines))
    return load(tmp_path / "graph.yaml")


@pytest.mark.sweep("more")
def test_a_value_is_spilled_over_a_stage_that_does_not_read_it(
    twice_graph: Graph, image: Any
) -> None:
    case = Case(twice_graph)
    problem = replace(case.within(AMPLE), precedence=None)  # in the order of the file
    value = next(value for value in problem.values if value.name == "encode.embeds")
    plan = spilling(solve(problem).plan, problem, value.name, "other", "denoise")
    trace = run(problem, plan, twice_graph, case.inputs)
    assert np.array_equal(pixels(trace.outputs["image"]), image)
    copy_bytes = {
        event.kind: event.nbytes for event in trace.events if event.kind in ("spill", "restore")
    }
    assert copy_bytes.keys() == {"spill", "restore"}
    assert 0 < copy_bytes["spill"] == copy_bytes["restore"] <= value.nbytes
    plain = run(problem, solve(problem).plan, twice_graph, case.inputs)
    phases = [slot.phase.startswith("other/1") for slot in plan.slots]
    lower = [
        a.peak_bytes < b.peak_bytes
        for a, b, is_other in zip(trace.slots, plain.slots, phases, strict=True)
        if is_other
    ]
    assert any(lower)


def spilling(
    plan: Plan, problem: Problem, value: str, spill_stage: str, restore_stage: str
) -> Plan:
    first = {
        stage: next(p.name for p in problem.phases if p.stage == stage)
        for stage in (spill_stage, restore_stage)
    }

    def changed(slot: Slot) -> Slot:
        extra = (
            {first[spill_stage]: Spill(value), first[restore_stage]: Restore(value)}.get(slot.phase)
            if slot.part == "load"
            else None
        )
        evicts = sum(type(action).__name__ == "Evict" for action in slot.actions)
        return (
            replace(slot, actions=(*slot.actions[:evicts], extra, *slot.actions[evicts:]))
            if extra
            else slot
        )

    return replace(plan, slots=tuple(changed(slot) for slot in plan.slots))


def test_stages_run_in_the_plans_order(twice_graph: Graph, image: Any) -> None:
    case = Case(twice_graph)
    problem = case.within(AMPLE)
    assert problem.precedence is not None
    order = ("encode", "denoise", "decode", "other")
    fixed = replace(problem, precedence=tuple(zip(order, order[1:], strict=False)))
    plan = solve(fixed).plan
    trace = run(fixed, plan, twice_graph, case.inputs)
    assert [slot.phase.split("/")[0] for slot in trace.slots if slot.part == "first"][-2:] == [
        "other",
        "other",
    ]
    assert np.array_equal(pixels(trace.outputs["image"]), image)


@pytest.fixture
def lora(flux: Case, tmp_path: Path) -> Graph:
    weight = flux.modules["transformer"].get_submodule("transformer_blocks.0.attn.to_q").weight
    key = "transformer.transformer_blocks.0.attn.to_q"
    generator = torch.Generator().manual_seed(1)
    lora_a, lora_b = (
        torch.randn(4, weight.shape[1], generator=generator),
        torch.randn(weight.shape[0], 4, generator=generator),
    )
    save_file(
        {f"{key}.lora_A.weight": lora_a, f"{key}.lora_B.weight": lora_b},
        tmp_path / "lora.safetensors",
    )
    styled = replace(
        flux.graph.components["transformer"],
        loras=(Adapter(str(tmp_path / "lora.safetensors"), 0.7),),
    )
    return replace(flux.graph, components={**flux.graph.components, "transformer": styled})


@pytest.mark.sweep("more")
def test_disk_backing_stores_are_split_into_layers_when_the_remaining_stages_fit_only_so(
    flux: Case, image: Any, stored_graph: Graph, lora: Graph
) -> None:
    styled = replace(
        stored_graph.components["transformer"], loras=lora.components["transformer"].loras
    )
    # no file holds these: they are spooled
    fused = replace(stored_graph, components={**stored_graph.components, "transformer": styled})
    modules = {**flux.modules, "transformer": build(lora.components["transformer"], lora)}
    for graph, expected in (
        (stored_graph, image),
        (fused, pixels(plain_image(lora, modules, flux.inputs))),
    ):
        any_store = problem_of(
            graph, flux.dry_run, simulated(), ProblemLimits(AMPLE, AMPLE), flux.inputs
        )
        problem = replace(
            any_store,
            components=tuple(c.stored_as("bfloat16 disk device") for c in any_store.components),
        )
        with without("layers"):
            plan = solve(problem).plan
        device, messages = open_device(problem), list[str]()
        denoise_slot = [slot.phase.split("/")[0] for slot in plan.slots].index("denoise")

        def vanish(
            index: int, call: int, calls: int, first: int = denoise_slot, machine: Any = device
        ) -> None:
            if index == first:
                # blocks take twice that, layers half of it
                machine.machine.capacity_bytes = 900_000

        trace = execute(
            solution_of(problem, plan),
            graph,
            flux.inputs,
            device,
            progress=vanish,
            tell=messages.append,
        )
        assert np.array_equal(pixels(trace.outputs["image"]), expected)
        assert len(messages) == 1
        assert (
            max(slot.peak_bytes for slot in trace.slots if slot.phase.startswith("denoise"))
            <= 900_000
        )
        layers = {
            event.detail
            for event in trace.events
            if event.kind == "fetch" and event.component == "transformer"
        }
        assert "transformer_blocks.0.attn.to_q" in layers
        assert device.allocated_bytes == 0


def test_a_run_with_a_lora_is_diffusers_with_the_fused_weights(
    flux: Case, image: Any, lora: Graph
) -> None:
    problem = flux.tight()
    modules = {**flux.modules, "transformer": build(lora.components["transformer"], lora)}
    expected = pixels(plain_image(lora, modules, flux.inputs))
    assert not np.array_equal(expected, image)
    trace = run(problem, solve(problem).plan, lora, flux.inputs)
    assert np.array_equal(pixels(trace.outputs["image"]), expected)


def test_a_run_with_a_lora_is_diffusers_own_with_peft(flux: Case, lora: Graph) -> None:
    pytest.importorskip("peft")
    from diffusers import FluxPipeline

    transformer: Any = build(flux.graph.components["transformer"], flux.graph)
    file = Path(lora.components["transformer"].loras[0].file)
    state = FluxPipeline.lora_state_dict(file.parent, weight_name=file.name)
    FluxPipeline.load_lora_into_transformer(state, None, transformer, adapter_name="style")
    transformer.set_adapters(["style"], [0.7])
    transformer.fuse_lora()
    expected = pixels(plain_image(lora, {**flux.modules, "transformer": transformer}, flux.inputs))
    problem = flux.tight()
    assert np.array_equal(
        pixels(run(problem, solve(problem).plan, lora, flux.inputs).outputs["image"]), expected
    )
