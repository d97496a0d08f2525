"""A denoising loop resumed in the middle ends with the same bits as an unbroken one, whatever state
its scheduler has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from stage_runs import stages_of

import graphrun
from graphrun.batch.cache.pack import pack, unpack
from graphrun.modules.build import build, meta_module, resolve_class
from graphrun.ops import Stages
from graphrun.ops.loops import resume_obstacle
from graphrun.ops.steps import Steps, StepState, journal_steps

STEPS = 5
CONFIGS: dict[str, dict[str, Any]] = {  # for schedulers other than the graph's
    "sdxl-tiny": {"beta_schedule": "scaled_linear", "steps_offset": 1},
    "wan-tiny": {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0},
}
GRAPHS = Path(__file__).parent.parent.parent / "graphs"


class Killed(BaseException):
    """Represents anything that ends a run."""


class MemoryJournal:
    """A journal that keeps each state as a file would, and ends the run after saving step ``end``
    (0: never)."""

    def __init__(self, begin: StepState | None = None, end: int = 0) -> None:
        self.begin, self.end, self.states = begin, end, dict[int, bytes]()

    def state(self, stage: str) -> StepState | None:
        return self.begin

    def wants(self, stage: str, step: int, steps: int) -> bool:
        return True

    def save(self, stage: str, state: StepState) -> None:
        self.states[state.finished_steps] = pack(
            {
                name: getattr(state, name)
                for name in ("finished_steps", "steps", "latents", "generator", "scheduler")
            }
        )
        if state.finished_steps == self.end:
            raise Killed

    def after(self, step: int) -> StepState:
        return StepState(**unpack(self.states[step]))


class Loops:
    """Tiny pipelines, run up to the end of their loops."""

    def __init__(self) -> None:
        self._built = dict[
            str, tuple[dict[str, Any], dict[str, Any]]
        ]()  # by name: modules, and meta modules of all components

    def stages(self, name: str, scheduler: str, journal: MemoryJournal | None = None) -> Stages:
        graph = graphrun.load(GRAPHS / f"{name}.yaml")
        if scheduler:
            part = replace(graph.parts["scheduler"], class_path=f"diffusers.{scheduler}")
            if name in CONFIGS:
                part = replace(part, config=CONFIGS[name])
            graph = replace(graph, parts={**graph.parts, "scheduler": part})
        graph = graph.until("denoise")
        if name not in self._built:
            modules = {
                c: build(graph.components[c], graph) for stage in graph.stages for c in stage.uses
            }
            self._built[name] = (
                modules,
                {
                    c: meta_module(component, graph.trust)
                    for c, component in graph.components.items()
                },
            )
        modules, meta_modules = self._built[name]
        inputs = graph.resolve(
            {
                "steps": STEPS,
                **({"height": 64, "width": 64} if name in ("flux-tiny", "sdxl-tiny") else {}),
            }
        )
        return stages_of(graph, modules, inputs, journal=journal, meta_modules=meta_modules)

    def __call__(self, name: str, scheduler: str, journal: MemoryJournal | None) -> torch.Tensor:
        latents: torch.Tensor = self.stages(name, scheduler, journal).run()["latents"]
        return latents


@pytest.fixture(scope="module")
def loops() -> Loops:
    return Loops()


@contextmanager
def breaking(
    stages: Stages, call: int, break_it: Callable[[], None] = lambda: None
) -> Iterator[list[int]]:
    """Ends the run at the denoiser's call number ``call``, after ``break_it``. Yields a list with
    one entry for each of its calls.
    """
    calls: list[int] = []
    denoiser = stages.modules["unet" if "unet" in stages.modules else "transformer"]

    def before(*_: Any) -> None:
        calls.append(len(calls) + 1)
        if len(calls) == call:
            break_it()
            raise Killed

    hook = denoiser.register_forward_pre_hook(before)
    try:
        yield calls
    finally:
        hook.remove()


CASES = [
    ("flux-tiny", ""),
    ("sdxl-tiny", ""),
    ("sdxl-tiny", "EulerAncestralDiscreteScheduler"),  # draws random numbers in every step
    (
        "sdxl-tiny",
        "DPMSolverMultistepScheduler",
    ),  # stores earlier model outputs, and computes the last steps differently
    ("sdxl-tiny", "UniPCMultistepScheduler"),
    ("sdxl-tiny", "DDIMScheduler"),
    ("chroma-tiny", ""),
    ("sana-tiny", ""),
    ("cogview4-tiny", ""),
    ("auraflow-tiny", ""),
    ("cogvideox-5b-tiny", ""),
    (
        "cogvideox-5b-tiny",
        "CogVideoXDPMScheduler",
    ),  # passes its last prediction on through the pipeline's loop
    ("hidream-tiny", ""),
    ("hunyuan-dit-tiny", ""),  # draws random numbers in every step
    ("hunyuan-video-tiny", ""),
    ("ltx-tiny", ""),
    ("pixart-sigma-tiny", ""),  # an older pipeline: `callback`
    ("qwen-image-tiny", ""),
    ("sd3-tiny", ""),  # asks for the number of a step
    ("wan-tiny", ""),  # so does this
    ("wan-tiny", "UniPCMultistepScheduler"),
]
ALWAYS = [
    ("flux-tiny", ""),
    ("sdxl-tiny", "EulerAncestralDiscreteScheduler"),
    ("cogvideox-5b-tiny", "CogVideoXDPMScheduler"),
    ("pixart-sigma-tiny", ""),
    ("wan-tiny", ""),
]


@pytest.mark.parametrize("case", sampled(CASES, ALWAYS, "steps"), ids="-".join)
def test_a_loop_begun_behind_any_step_ends_with_the_same_bits(
    loops: Loops, case: tuple[str, str]
) -> None:
    (name, scheduler), whole = case, MemoryJournal()
    expected = loops(name, scheduler, None)
    assert torch.equal(loops(name, scheduler, whole), expected)
    assert sorted(whole.states) == list(range(1, STEPS)), "a state for every step but the last"
    broken_journal = MemoryJournal(end=3)
    with pytest.raises(Killed):
        loops(name, scheduler, broken_journal)
    assert sorted(broken_journal.states) == [1, 2, 3]
    for journal, finished_steps in ((whole, 1), (broken_journal, 3), (whole, STEPS - 1)):
        resumed = MemoryJournal(begin=journal.after(finished_steps))
        assert torch.equal(loops(name, scheduler, resumed), expected)
        assert sorted(resumed.states) == list(range(finished_steps + 1, STEPS)), (
            "no step runs twice"
        )


@pytest.mark.parametrize("case", sampled(CASES, ALWAYS, "steps"), ids="-".join)
def test_a_run_interrupted_in_a_step_resumes_with_that_step_and_has_the_same_bits(
    loops: Loops, case: tuple[str, str]
) -> None:
    (name, scheduler), whole, stages = case, MemoryJournal(), loops.stages(*case)
    with breaking(stages, 0) as calls:
        expected = loops(name, scheduler, whole)
    a_step = len(calls) // STEPS
    with (
        breaking(stages, 3 * a_step + 1),
        pytest.raises(Killed),
    ):  # the first call of the fourth step
        stages.run()
    stages.move_to_host()
    state = stages.steps.state("denoise")
    assert state is not None
    assert (state.finished_steps, state.steps) == (3, STEPS)
    with (
        breaking(stages, a_step + 1) as resumed,
        pytest.raises(Killed),
    ):  # the first call of the fifth step
        stages.run()
    stages.move_to_host()
    with breaking(stages, 0) as last:
        assert torch.equal(stages.run()["latents"], expected)
    assert (len(resumed), len(last)) == (a_step + 1, a_step)
    assert stages.steps.state("denoise") is None, "no state is kept after the loop's end"


@pytest.mark.sweep("more")
def test_a_state_that_the_interrupted_step_changed_is_dropped(loops: Loops) -> None:
    stages = loops.stages("flux-tiny", "")

    def change() -> None:
        state = stages.steps.state("denoise")
        assert state is not None
        state.latents.mul_(2)

    with breaking(stages, 3, change), pytest.raises(Killed):
        stages.run()
    stages.move_to_host()
    assert stages.steps.state("denoise") is None
    assert torch.equal(stages.run()["latents"], loops("flux-tiny", "", MemoryJournal()))


@pytest.mark.sweep("more")
def test_the_loops_of_all_reference_graphs_but_nine_can_be_resumed() -> None:
    graphs = {path.stem: graphrun.load(path) for path in GRAPHS.glob("*-tiny.yaml")}
    cannot = {
        name
        for name, graph in graphs.items()
        if resume_obstacle(resolve_class(graph.pipeline, graph.trust))
    }
    assert cannot == {
        "ace-step-tiny",  # its loop does not assign a variable called latents
        "cosmos3-nano-tiny",  # its steps read sound and actions of the step before
        "flux3-klein-tiny",  # modular pipelines have no callback
        "hunyuan-video15-tiny",  # has no callback
        "kandinsky6-tiny",  # its steps read the sound of the step before
        "ltx2-tiny",  # its steps read the sound of the step before
        "minimax-h3-tiny",  # modular pipelines have no callback
        "stable-cascade-tiny",  # no loop over timesteps is found in its prior
        "wan-animate-2-tiny",  # modular pipelines have no callback
    }
    pairs = {
        graph.pipeline
        for name, graph in graphs.items()
        if name not in cannot and "denoise" in {s.name for s in graph.stages}
    }
    assert pairs == {graphs[name].pipeline for name, _ in CASES}


def test_latents_that_another_variable_refers_to_are_not_saved() -> None:
    class Inpaint:
        def __call__(self, generator: Any = None, callback: Any = None) -> Any:
            timesteps = torch.arange(3)
            latents = torch.zeros(2)
            noise = latents if self.shared else None  # type: ignore[attr-defined]
            for i, _ in enumerate(timesteps):
                latents = latents + i
                callback(i, 0, latents)
            return latents, noise

    for shared in (False, True):
        pipeline, journal = Inpaint(), MemoryJournal()
        pipeline.shared, pipeline.scheduler = shared, Scheduler()  # type: ignore[attr-defined]
        with journal_steps(pipeline, "denoise", torch.Generator(), Steps(journal)) as callbacks:
            pipeline(**callbacks)
        assert sorted(journal.states) == ([] if shared else [1, 2])


class Scheduler:
    """A scheduler without state."""

    order = 1

    def step(self, output: Any, sample: Any) -> Any:
        return sample
