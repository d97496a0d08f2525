"""`simulate`: reads, backing stores on disk, spills, the CPU and sessions, in plans small enough to
calculate by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import component, problem
from planner_session import COLD, SESSION, K, example_problem, plan_for

from graphrun.errors import PlanError
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.model.simulation import Simulation
from graphrun.verify.simulate import simulate


def run(problem: Problem, text: str) -> Simulation:
    return simulate(problem, plan_for(problem, text))


def spans(simulation: Simulation, slot: int, kind: str) -> list[tuple[str, float, float]]:
    start = sum(report.seconds for report in simulation.all_slots[:slot])
    return [
        (e.detail, e.start_seconds - start, e.end_seconds - start)
        for e in simulation.events
        if (e.slot, e.kind) == (slot, kind)
    ]


def test_a_cold_run_slot_by_slot() -> None:
    simulation = run(example_problem(), COLD)
    # read te 2 | on the CPU 8 | spill 2, up 2 | up 8, meanwhile read dit 4*4 + 2, then its
    # remainder 1 | restore 1, d0 2 | ...
    assert [slot.seconds for slot in simulation.slots[:5]] == [2, 8, 4, 19, 3]
    assert spans(simulation, 2, "spill") == [("embeds", 0, 2)]
    assert spans(simulation, 2, "load") == [("mid.0", 2, 3), ("mid.1", 3, 4)]
    assert spans(simulation, 3, "read") == [
        *((f"big.{i}", 4 * i, 4 * i + 4) for i in range(4)),
        ("unblocked.0", 16, 18),
    ]
    assert spans(simulation, 3, "load") == [("unblocked.0", 18, 19)]
    assert spans(simulation, 4, "restore") == [("embeds", 0, 1)]
    assert [slot.seconds for slot in simulation.slots[7:]] == [3, 2, 0], "tiling takes 2"
    assert (simulation.total_seconds, simulation.further_slots, simulation.further_seconds) == (
        simulation.seconds,
        (),
        0,
    )
    assert simulation.slots[4].restored_bytes == 512
    up_bytes, unblocked, streamed, vae = 2 * K, K, 3 * 2 * K, 3 * K
    assert simulation.moved_bytes == up_bytes + unblocked + 2 * K + 4 * streamed + vae + 512, (
        "with the restored value"
    )


def test_bytes_of_a_cold_run_on_the_host() -> None:
    slots = run(example_problem(), COLD).slots
    te, up_bytes, dit, vae = 2 * K, 2 * K, 9 * K, 3 * K
    assert [slot.host_bytes for slot in slots] == [
        te + up_bytes + vae,
        te + up_bytes + vae + 500,
        up_bytes + vae + 512,
        up_bytes + dit + 100 + vae + 512,
        dit + vae + 512,
        dit + vae,
        dit + vae,
        vae,
        vae,
        vae,
    ]
    assert [slot.pinned_bytes for slot in slots] == [
        up_bytes + vae, up_bytes + vae, up_bytes + vae, up_bytes + dit + vae, dit + vae, dit + vae,
        dit + vae, vae, vae, vae,
    ]  # fmt: skip
    assert [slot.values_bytes for slot in slots[:5]] == [0, 0, 512, 0, 612]
    assert [slot.activation_bytes for slot in slots] == [0, 0, 0, 600, 0, 900, 1000, 0, K, 0]
    assert [slot.disk_bytes_read for slot in slots[:4]] == [te, 0, 0, dit]
    assert slots[1].resident_bytes == 0


def test_a_session_is_its_first_run_and_the_others() -> None:
    simulation = run(example_problem(runs=3), SESSION)
    assert len(simulation.further_slots) == len(simulation.slots) == 10
    assert simulation.further_seconds == sum(slot.seconds for slot in simulation.further_slots)
    assert simulation.total_seconds == simulation.seconds + 2 * simulation.further_seconds
    assert (
        simulation.total_moved_bytes == simulation.moved_bytes + 2 * simulation.further_moved_bytes
    )
    # first run only: load up and dit's remainder, read te
    assert simulation.moved_bytes - simulation.further_moved_bytes == 2 * K + K
    assert [
        (a.seconds, b.seconds)
        for a, b in zip(simulation.slots, simulation.further_slots, strict=True)
        if a.seconds != b.seconds
    ] == [(2, 0)]
    assert simulation.events[-1].slot == 19
    assert simulation.host_peak_bytes == max(slot.host_bytes for slot in simulation.further_slots)
    assert simulation.pinned_peak_bytes == simulation.further_slots[-1].pinned_bytes


def problem_with_disk_store(
    bounce: int, read_seconds: float, copy: float, compute: float, calls: int = 1
) -> Problem:
    dit, vae = component("dit", ("big", 4, K)), component("vae", ("mid", 2, K))
    variant = replace(
        dit.variants[0],
        backing_store="disk",
        host_bytes=bounce,
        load_seconds=(copy,),
        disk_seconds=(read_seconds,),
    )
    read_in_run = replace(vae.variants[0], load_seconds=(1.0,), read_seconds=(4.0,))
    phases = (PhaseNumbers("denoise", 0, (Use("dit", calls, (calls,), (compute,)),), 0, 0, 0),)
    return problem(
        2**20, (replace(dit, variants=(variant,)), replace(vae, variants=(read_in_run,))), phases
    )


STREAMED = """plan {digest}
slot denoise/0:dit load
slot denoise/0:dit first
  stream dit keep none ring buffer 2 KiB
  run
slot end"""


def test_blocks_on_disk_are_fetched_before_every_copy_through_a_bounce_buffer_for_two() -> None:
    simulation = run(problem_with_disk_store(2 * K, 3.0, 2.0, 1.0), STREAMED)
    # disk    0..3|3..6|6..9|9..12        the buffer has room for two: the third fetch waits for the
    # first copy, which ends at 5 copy        3..5|6..8|9..11|12..14 compute         5..6|8..9
    # ...|14..15
    assert spans(simulation, 1, "fetch") == [(f"big.{i}", 3 * i, 3 * i + 3) for i in range(4)]
    assert spans(simulation, 1, "stream") == [(f"big.{i}", 3 * i + 3, 3 * i + 5) for i in range(4)]
    assert simulation.slots[1].seconds == 15
    assert simulation.slots[1].disk_bytes_read == 4 * K


def test_blocks_that_are_copied_from_their_file_are_read_from_disk() -> None:
    fetched = problem_with_disk_store(2 * K, 3.0, 2.0, 1.0)
    dit, vae = fetched.components
    variant = replace(dit.variants[0], backing_store="file", disk_seconds=())
    components = (replace(dit, variants=(variant,)), vae)
    slot = run(replace(fetched, components=components), STREAMED).slots[1]
    assert (slot.streamed_bytes, slot.disk_bytes_read) == (4 * K, 4 * K)


def test_a_fetch_waits_for_room_in_the_bounce_buffer() -> None:
    simulation = run(problem_with_disk_store(K, 3.0, 2.0, 1.0), STREAMED)
    assert spans(simulation, 1, "fetch") == [(f"big.{i}", 5 * i, 5 * i + 3) for i in range(4)], (
        "room for one block: fetch, copy, fetch, ..."
    )
    slow = run(problem_with_disk_store(2 * K, 1.0, 4.0, 1.0), STREAMED)
    assert spans(slow, 1, "fetch") == [
        ("big.0", 0, 1),
        ("big.1", 1, 2),
        ("big.2", 5, 6),
        ("big.3", 9, 10),
    ]
    with pytest.raises(
        PlanError,
        match="the bounce buffer of dit: a block of 1024 bytes does not fit a ring buffer of 1023"
        " bytes",
    ):
        run(problem_with_disk_store(K - 1, 3.0, 2.0, 1.0), STREAMED)


def test_reads_are_interleaved_with_fetches_in_proportion_once_the_buffer_is_full() -> None:
    text = STREAMED.replace("  stream", "  read vae\n  stream").replace(
        "  run", "  load vae all from pinned\n  run"
    )
    simulation = run(problem_with_disk_store(2 * K, 3.0, 2.0, 1.0), text)
    kinds = [
        (e.kind, e.detail)
        for e in sorted(simulation.events, key=lambda e: e.start_seconds)
        if e.kind in ("fetch", "read")
    ]
    fetches = [("fetch", f"big.{i}") for i in range(4)]
    assert kinds == [*fetches[:2], ("read", "mid.0"), ("read", "mid.1"), *fetches[2:]], (
        "half is fetched, then read in proportion"
    )
    # disk 0..3|3..6|r 6..10|r 10..14|14..17|17..20      copies 3..5|6..8|17..19|v 19..20|v
    # 20..21|21..23, and 1 of compute
    assert simulation.slots[1].seconds == 24
    assert simulation.slots[1].disk_bytes_read == 6 * K


def test_reads_as_large_as_the_fetches_alternate_with_them_once_the_buffer_is_full() -> None:
    problem = problem_with_disk_store(2 * K, 3.0, 2.0, 1.0)
    vae = component("vae", ("mid", 4, K))
    vae = replace(vae, variants=(replace(vae.variants[0], read_seconds=(4.0,)),))
    simulation = run(
        replace(problem, components=(problem.components[0], vae)),
        STREAMED.replace("  stream", "  read vae\n  stream"),
    )
    channel = [event for event in simulation.events if event.kind in ("fetch", "read")]
    assert "".join(event.kind[0] for event in channel) == "ffrrrfrf", (
        "a read begins as long as no larger share is read than fetched"
    )


def test_reads_come_last_where_the_buffer_is_never_full() -> None:
    simulation = run(
        problem_with_disk_store(4 * K, 3.0, 2.0, 1.0),
        STREAMED.replace("  stream", "  read vae\n  stream"),
    )
    assert spans(simulation, 1, "read") == [("mid.0", 12, 16), ("mid.1", 16, 20)]
    assert simulation.slots[1].seconds == 20


def test_each_load_waits_for_its_own_read_and_other_loads_go_first() -> None:
    problem = problem_with_disk_store(2 * K, 3.0, 1.0, 1.0)
    other = component("up", ("mid", 2, K))
    other = replace(other, variants=(replace(other.variants[0], load_seconds=(1.0,)),))
    text = """plan {digest}
slot denoise/0:dit load
  read vae
  load vae all from pinned
  load up all from pinned
slot denoise/0:dit first
  stream dit keep none ring buffer 2 KiB
  run
slot end
  evict up all
  evict vae all"""
    simulation = run(replace(problem, components=(*problem.components, other)), text)
    loads = [
        (e.component, e.start_seconds, e.end_seconds)
        for e in simulation.events
        if (e.slot, e.kind) == (0, "load")
    ]
    assert loads == [("up", 0, 1), ("up", 1, 2), ("vae", 4, 5), ("vae", 8, 9)]
    assert simulation.slots[0].seconds == 9


def test_prefetches_from_pageable_memory_come_last() -> None:
    problem = problem_with_disk_store(2 * K, 3.0, 1.0, 1.0)
    dit, vae = problem.components
    pageable = replace(vae.variants[0], backing_store="pageable", read_seconds=())
    up_component = component("up", ("mid", 1, K), seconds_per_byte=1 / K)
    text = """plan {digest}
slot denoise/0:dit load
  load vae all from pageable
  load up all from pinned
slot end"""
    simulation = run(
        replace(problem, components=(dit, replace(vae, variants=(pageable,)), up_component)), text
    )
    assert [event.component for event in simulation.events] == ["up", "vae", "vae"]


def test_streaming_does_not_wait_for_a_prefetch_whose_read_is_late() -> None:
    problem = problem_with_disk_store(0, 0.0, 1.0, 3.0, calls=3)
    pinned = replace(
        problem.components[0].variants[0], backing_store="pinned", disk_seconds=(), host_bytes=4 * K
    )
    problem = replace(
        problem,
        components=(replace(problem.components[0], variants=(pinned,)), problem.components[1]),
    )
    text = STREAMED.replace(
        "slot end",
        "slot denoise/0:dit steady x2\n  stream dit keep none ring buffer 2 KiB\n  run\nslot end",
    )
    concurrent = text.replace("first\n", "first\n  read vae\n").replace(
        "2 KiB\n  run", "2 KiB\n  load vae all from pinned\n  run", 1
    )
    separate, simulation = run(problem, text), run(problem, concurrent)
    assert spans(simulation, 1, "read") == [("mid.0", 0, 4), ("mid.1", 4, 8)]
    assert separate.slots[1].seconds == simulation.slots[1].seconds == 13
    assert [start for _, start, _ in spans(simulation, 1, "load")] == [4, 8]


def test_streaming_does_not_wait_for_a_prefetch_whose_memory_is_not_yet_page_locked() -> None:
    problem = problem_with_disk_store(0, 0.0, 1.0, 3.0)
    dit, vae = problem.components
    pinned = replace(dit.variants[0], backing_store="pinned", disk_seconds=(), host_bytes=4 * K)
    read_at_once = replace(vae.variants[0], read_seconds=(1.0,))
    problem = replace(
        problem,
        components=(replace(dit, variants=(pinned,)), replace(vae, variants=(read_at_once,))),
        hardware=replace(problem.hardware, page_lock_seconds=10 / vae.variants[0].host_bytes),
    )
    text = STREAMED.replace("  stream", "  read vae\n  stream").replace(
        "  run", "  load vae all from pinned\n  run"
    )
    simulation = run(problem, text)
    assert spans(simulation, 1, "read") == [("mid.0", 0, 1), ("mid.1", 1, 2)]
    assert [span[1:] for span in spans(simulation, 1, "stream")] == [(0, 1), (1, 2), (4, 5), (7, 8)]
    assert [span[1:] for span in spans(simulation, 1, "load")] == [(10, 11), (11, 12)]
    read_only = run(problem, "plan x\nslot denoise/0:dit load\n  read vae\nslot end")
    assert read_only.slots[0].seconds == 10, "the slot ends when the memory is page-locked"


def test_streaming_does_not_wait_for_a_prefetch_whose_fetch_is_late() -> None:
    problem = problem_with_disk_store(0, 0.0, 1.0, 3.0, calls=3)
    pinned = replace(
        problem.components[0].variants[0], backing_store="pinned", disk_seconds=(), host_bytes=4 * K
    )
    late = component("late", ("b", 2, K))
    late = replace(
        late,
        variants=(
            replace(
                late.variants[0],
                backing_store="disk",
                host_bytes=2 * K,
                disk_seconds=(9.0,),
                load_seconds=(2.0,),
            ),
        ),
    )
    problem = replace(
        problem, components=(replace(problem.components[0], variants=(pinned,)), late)
    )
    simulation = run(problem, STREAMED.replace("  run\n", "  load late b[0-1] from disk\n  run\n"))
    # fetch    0..9|9..18        copies  s0 0..1|s1 1..2|s2 4..5|s3 7..8|l0 10..12|l1 18..20: s2 and
    # s3 wait for compute only
    assert [span[1:] for span in spans(simulation, 1, "fetch")] == [(0, 9), (9, 18)]
    assert [span[1:] for span in spans(simulation, 1, "stream")] == [(0, 1), (1, 2), (4, 5), (7, 8)]
    assert [span[1:] for span in spans(simulation, 1, "load")] == [(9, 11), (18, 20)]


def test_compute_on_the_cpu_waits_for_its_own_read_while_copies_continue() -> None:
    text = COLD.replace(
        "  read te\nslot encode/0:te first\n",
        "slot encode/0:te first\n  read te\n  load up all from pinned\n",
    )
    text = text.replace(
        "  drop te\n  spill embeds\n  load up all from pinned\n", "  drop te\n  spill embeds\n"
    )
    simulation = run(example_problem(), text)
    assert spans(simulation, 1, "run") == [("call 0", 2, 10)], "8 times slower, after its read"
    assert spans(simulation, 1, "load") == [("mid.0", 0, 1), ("mid.1", 1, 2)]
    assert simulation.slots[1].compute_seconds == 8
    assert (simulation.slots[0].seconds, simulation.slots[1].seconds) == (0, 10)


def test_a_stage_report_sums_reads_and_takes_the_peak_of_host_bytes() -> None:
    problem = example_problem()
    simulation = run(problem, COLD)
    stages = {stage.stage: stage for stage in simulation.stages()}
    assert list(stages) == ["encode", "refine", "denoise", "decode"]
    assert stages["refine"].disk_bytes_read == 9 * K
    assert stages["refine"].host_bytes == simulation.host_peak_bytes
    assert stages["decode"].pinned_bytes == 3 * K


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("spill embeds", "spill embodies", "no value 'embodies'"),
        ("read te", "read tee", "no component 'tee'"),
        (
            "variant dit bfloat16 pinned device\n",
            "",
            "variant: the plan chooses none for dit; it has bfloat16 pinned",
        ),
        ("option decode tiling", "option decode slicing", "slicing is not allowed"),
    ],
)
def test_a_plan_that_cannot_be_executed_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(example_problem(), COLD.replace(old, new))
