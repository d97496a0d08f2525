"""A session's further runs are all the same; it is asked from any thread, runs one at a time, and leaves nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.errors import InputError, PlanError
from graphrun.planner.simulate import simulate

SMALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}
BUDGET = {"vram": "6M", "ram": "8G", "hardware": "sim"}


def test_further_runs_are_the_same_to_the_action_and_as_planned(flux: Any, kept_dry_runs: Path) -> None:
    with graphrun.Session(flux, inputs=SMALL, cache=kept_dry_runs, **BUDGET) as session:
        planned = simulate(session.solution.problem, session.solution.plan)
        traces = session.map([{"prompt": f"prompt {number}"} for number in range(4)])
        assert session.device.allocated_bytes > 0 or planned.again_moved_bytes == planned.moved_bytes
        tiers = session.close()
    told = [[(e.kind, e.component, e.slot, e.detail, e.nbytes) for e in trace.events] for trace in traces]
    assert told[1] == told[2] == told[3]
    assert [trace.seconds for trace in traces[2:]] == pytest.approx([traces[1].seconds] * 2, rel=1e-9)
    assert traces[1].seconds == pytest.approx(planned.again_seconds, rel=0.02)
    assert traces[1].moved_bytes < traces[0].moved_bytes
    assert [tier.left_bytes for tier in tiers] == [0, 0, 0]
    cold = graphrun.plan(graphrun.estimate(flux, inputs=SMALL, cache=kept_dry_runs, **BUDGET))
    alone = graphrun.run(cold, flux, {"prompt": "prompt 3"})
    assert traces[3].outputs["image"].tobytes() == alone.outputs["image"].tobytes()


def test_threads_take_turns_and_each_gets_its_own_picture(flux: Any, kept_dry_runs: Path) -> None:
    running, most, found = 0, 0, dict[int, bytes]()

    def told(slot: int, call: int, calls: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1

    with graphrun.Session(flux, inputs=SMALL, cache=kept_dry_runs, **BUDGET) as session:

        def ask(number: int) -> None:
            found[number] = session.run({"prompt": f"prompt {number % 2}"}, progress=told).outputs["image"].tobytes()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 1
    assert found[0] == found[2] != found[1] == found[3]


def test_after_a_failed_run_the_next_one_begins_anew(flux: Any, kept_dry_runs: Path) -> None:
    with graphrun.Session(flux, inputs=SMALL, cache=kept_dry_runs, **BUDGET) as session:
        first = session.run({"prompt": "a"})

        def stop(slot: int, call: int, calls: int) -> None:
            if call:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.run({"prompt": "a"}, progress=stop)
        assert session.device.allocated_bytes == 0
        again = session.run({"prompt": "a"})
    assert again.moved_bytes == first.moved_bytes
    assert again.outputs["image"].tobytes() == first.outputs["image"].tobytes()


def test_what_was_not_planned_is_refused(flux: Any, kept_dry_runs: Path) -> None:
    session = graphrun.Session(flux, inputs=SMALL, cache=kept_dry_runs, **BUDGET)
    with pytest.raises(PlanError, match="the plan is for height=32, this run has height=64"):
        session.submit({"height": 64})
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.run()
    with pytest.raises(InputError, match="two runs at least"):
        graphrun.Session(flux, runs=1, **BUDGET)
