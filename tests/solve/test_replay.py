"""`reserved_bytes`: plans small enough to count the pages of each slot by hand.

Every tensor is as large as a page of the allocator or a multiple, P.
"""

from __future__ import annotations

from dataclasses import replace

from planner_problems import component, hardware, problem

from graphrun.model.phase_trace import CALL, CallTrace, PhaseTrace, repeats_in
from graphrun.model.plan import parse
from graphrun.model.problem import PhaseNumbers, Problem, Secondary, Use, ValueNumbers
from graphrun.units import MIB
from graphrun.verify.pages import limit_bytes, reserved_bytes
from graphrun.verify.solution import broken_rules, solution_of

P = 20 * MIB


def phase(stage: str, name: str, trace: PhaseTrace, input_bytes: int = 0) -> PhaseNumbers:
    use = Use(name, 1, (1,), (1.0,))
    return PhaseNumbers(stage, 0, (use,), input_bytes, P, P, trace=trace)


def example_problem(events: tuple[tuple[int, int], ...] = ((1, P), (1, 0))) -> Problem:
    """Three stages that call a component each; the last one reads what the first one makes."""
    names = ("te", "up", "dit")
    calls = {name: PhaseTrace((CallTrace(name, events),), ((0, CALL),)) for name in names}
    encode = replace(calls["te"], first=((0, CALL), (7, P)))
    phases = (
        phase("encode", "te", encode),
        phase("upscale", "up", calls["up"]),
        phase("denoise", "dit", calls["dit"]),
    )
    embeds = ValueNumbers("embeds", P, "encode", ("denoise",), 1, 2, storages=(7,))
    components = tuple(component(name, ("unblocked", 1, P)) for name in names)
    instance = problem(2**40, components, phases, (embeds,))
    return replace(instance, hardware=replace(instance.hardware, caching_allocator=True))


PLAN = """plan x
slot encode/0:te load
  load te all from pinned
slot encode/0:te first
  run
slot upscale/0:up load
  evict te all
  spill embeds
  load up all from pinned
slot upscale/0:up first
  run
slot denoise/0:dit load
  evict up all
  restore embeds
  load dit all from pinned
slot denoise/0:dit first
  run
slot end
  evict dit all
"""


def pages(problem: Problem, text: str = PLAN, secondary: int = 0) -> list[float]:
    return [nbytes / P for nbytes in reserved_bytes(problem, parse(text), secondary)]


def test_a_spilled_value_leaves_its_page_to_the_call_after_it() -> None:
    # te | te + call, then embeds in its place | embeds + up | up + call where embeds was |
    # embeds + dit | embeds + dit + call, and the end slot returns no pages
    assert pages(example_problem()) == [1, 2, 2, 2, 2, 3, 3]
    stays = PLAN.replace("  spill embeds\n", "").replace("  restore embeds\n", "")
    assert pages(example_problem(), stays) == [1, 2, 2, 3, 2, 3, 3]


def test_inputs_that_no_stage_made_are_one_tensor() -> None:
    instance = example_problem()
    encode, *phases = instance.phases
    needy = replace(instance, phases=(replace(encode, input_bytes=2 * P), *phases))
    assert pages(needy)[:3] == [3, 4, 2]
    prelude = replace(encode.trace, prelude=((5, P),))
    partly = replace(encode, input_bytes=2 * P, trace=prelude)
    assert pages(replace(instance, phases=(partly, *phases)))[:3] == [3, 4, 3]


def test_no_limit_where_nothing_is_counted_in_pages() -> None:
    instance = example_problem()
    assert limit_bytes(instance, parse(PLAN)) == 3 * P
    plain = replace(instance, hardware=replace(instance.hardware, caching_allocator=False))
    assert limit_bytes(plain, parse(PLAN)) == 0


def test_a_call_that_repeats_itself_takes_as_much_as_its_first_repetition() -> None:
    repetition = ((1, P), (2, P), (3, 2 * P), (2, 0), (1, 0), (3, 0))
    for count in (1, 2, 9):
        assert pages(example_problem(count * repetition)) == [1, 5, 2, 5, 2, 6, 6]
    # each block makes an output and three scratch tensors, and releases the output before
    events = [(10, P)]
    for key in range(10, 19):
        scratch = ((2, P), (2, 0), (3, P), (4, P), (4, 0), (3, 0))
        events += [(key + 1, P), *scratch, (key, 0)]
    assert repeats_in(tuple(events))[1]
    assert pages(example_problem((*events, (19, 0)))) == [1, 5, 2, 5, 2, 6, 6]


def test_a_further_run_takes_the_pages_of_the_first() -> None:
    session = replace(example_problem(), runs=2)
    text = PLAN + PLAN.replace("plan x", "again")
    assert pages(session, text) == 2 * [1, 2, 2, 2, 2, 3, 3]


def test_the_result_of_a_call_keeps_its_page_until_something_is_released() -> None:
    instance = example_problem()
    encode, *phases = instance.phases
    call = replace(encode.trace.calls[0], results=(1,))
    for items, encode_pages in ((((8, 3 * P),), 5), (((9, 0), (8, 3 * P)), 4), (((8, P),), 2)):
        trace = replace(encode.trace, calls=(call,), first=((0, CALL), *items))
        variation = replace(instance, phases=(replace(encode, trace=trace), *phases))
        assert pages(variation)[1] == encode_pages


def test_ring_buffers_are_released_after_their_slot() -> None:
    streamed = PLAN.replace(
        "slot upscale/0:up first\n",
        "slot upscale/0:up first\n  stream up keep all ring buffer 40 MiB\n",
    )
    assert pages(example_problem(), streamed) == [1, 2, 2, 4, 2, 3, 3]


def split_problem() -> Problem:
    """`example_problem` with ``up`` on a secondary device."""
    instance = replace(example_problem(), secondaries=(Secondary(hardware(), 2**40),))
    te, upscaler, dit = instance.components
    variant = replace(upscaler.variants[0], device="device1")
    upscaler = replace(upscaler, variants=(variant,))
    encode, upscale, denoise = instance.phases
    upscale = replace(upscale, uses=(replace(upscale.uses[0], transfer=(2 * P, P)),))
    return replace(instance, components=(te, upscaler, dit), phases=(encode, upscale, denoise))


def test_a_secondary_device_has_weights_arguments_and_calls_but_no_values() -> None:
    # up | up + arguments + call
    assert pages(split_problem(), secondary=1) == [0, 0, 1, 4, 0, 0, 0]
    # te | te + call, then embeds | embeds | nothing | embeds + dit | embeds + dit + call
    assert pages(split_problem()) == [1, 2, 1, 1, 2, 3, 3]


def test_a_solution_in_pages_has_those_of_every_device() -> None:
    instance = split_problem()
    solution = solution_of(instance, replace(parse(PLAN), problem=instance.digest))
    slots = solution.simulation.slots
    assert [slot.peak_bytes / P for slot in slots] == [1, 2, 1, 1, 2, 3, 3]
    assert [slot.secondary_peaks[0] / P for slot in slots] == [0, 0, 1, 4, 0, 0, 0]


def test_a_budget_of_pages_is_exact() -> None:
    instance = example_problem()
    phases = tuple(replace(phase, first_bytes=0) for phase in instance.phases)
    for budget_bytes, slots in ((3 * P, []), (3 * P - 1, [5, 6])):
        tight = replace(instance, budget_bytes=budget_bytes, phases=phases)
        violations = broken_rules(tight, replace(parse(PLAN), problem=tight.digest))
        assert [(v.rule, v.slot, v.action) for v in violations] == [("pages", k, -1) for k in slots]
