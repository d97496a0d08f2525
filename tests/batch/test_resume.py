"""A batch that is killed at any moment resumes, and ends like one that was not: every request once,
with the same bits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import sampled

import graphrun
from graphrun.batch.journal import Journal
from graphrun.batch.watch import Watcher
from graphrun.errors import InputError

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
SMALL: dict[str, dict[str, Any]] = {
    "flux-tiny": {"height": 32, "width": 32, "max_sequence_length": 16},
    "wan-tiny": {},
}

# The third has the first's prompt, which is encoded once.
REQUESTS = [{"prompt": "a", "seed": 1}, {"prompt": "b", "seed": 2}, {"prompt": "a", "seed": 3}]


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(batch: Any, sink: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The images of a batch that ran without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    batch(REQUESTS, sink=sink(folder))
    return pictures(folder)


@pytest.mark.sweep("more")
@pytest.mark.parametrize("first", random.Random(7).sample(range(1, 24), 2))
def test_killed_at_any_write_it_resumes_and_ends_with_the_same_bits(
    batch: Any, sink: Any, kill_run: Any, whole: dict[str, bytes], first: int, tmp_path: Path
) -> None:
    def work() -> Any:
        return batch(REQUESTS, sink=sink(tmp_path / "out"), resume=tmp_path / "state")

    kills = [moment for moment in (first, 5) if not kill_run(work, moment)]
    assert first in kills
    work()
    assert pictures(tmp_path / "out") == whole
    resumed_batch = work()
    assert resumed_batch.done_before == (1, 2, 3)
    assert not resumed_batch.traces, "what is done is not done again"


class Interrupted(BaseException):
    pass


@pytest.fixture
def interrupted(batch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a batch that is interrupted when the state after the second step is saved."""

    class Broken(Journal):
        def request(self, number: int) -> Any:
            part = super().request(number)
            save = part.save

            def saved(stage: str, state: Any) -> None:
                save(stage, state)
                if state.finished_steps == 2:
                    raise Interrupted

            part.save = saved  # type: ignore[method-assign]
            return part

    def run(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("graphrun.batch.journal.Journal", Broken)
            with pytest.raises(Interrupted):
                batch(*arguments, **options)

    return run


@pytest.mark.parametrize("name", sampled(["flux-tiny", "wan-tiny"], ["flux-tiny"], "faults"))
def test_it_resumes_after_the_last_step(
    batch: Any, interrupted: Any, name: str, tmp_path: Path
) -> None:
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    common = {"common": {**SMALL[name], "steps": 3}, "graph": graph}
    expected = batch(REQUESTS[:1], **common)
    interrupted(REQUESTS[:1], resume=tmp_path / "state", **common)
    resumed = batch(REQUESTS[:1], resume=tmp_path / "state", **common)
    (steps,) = [
        sum(slot.calls for slot in trace.slots)
        for stages, _, trace in expected.traces
        if "denoise" in stages
    ]
    calls = {stages: sum(slot.calls for slot in trace.slots) for stages, _, trace in resumed.traces}
    assert calls[("denoise",)] * 3 <= steps, "one step of three is left"
    assert list(calls) == [("denoise",), ("decode",)], "and no prompt is encoded"
    assert np.array_equal(
        np.asarray(resumed.outputs[1]["image"]), np.asarray(expected.outputs[1]["image"])
    )


@pytest.mark.sweep("more")
def test_a_loop_whose_state_does_not_fit_restarts_and_says_so(
    batch: Any, interrupted: Any, tmp_path: Path
) -> None:
    restarts = []

    class Listener(Watcher):
        def restarts(self, stage: str, reason: str) -> None:
            restarts.append((stage, reason))

    interrupted(REQUESTS[:1], resume=tmp_path)
    journal = Journal(tmp_path)
    request = journal.request(1)
    state = request.state("denoise")
    assert state is not None
    request.save("denoise", replace(state, latents=state.latents[:, :1]))
    journal.close()
    results = batch(REQUESTS[:1], resume=tmp_path, watcher=Listener())
    assert (
        results.outputs[1]["image"].tobytes() == batch(REQUESTS[:1]).outputs[1]["image"].tobytes()
    )
    ((stage, reason),) = restarts
    assert stage == "denoise of request 1"
    assert "in the saved state: remove it and start again" in reason


@pytest.mark.sweep("more")
def test_another_graph_is_refused_with_what_changed(batch: Any, flux: Any, tmp_path: Path) -> None:
    state = tmp_path / "state"
    batch(REQUESTS[:1], resume=state)
    vae = replace(flux.components["vae"], seed=5)
    with pytest.raises(InputError, match=r"components.vae: weights: was .*, is "):
        batch(
            REQUESTS[:1],
            graph=replace(flux, components={**flux.components, "vae": vae}),
            resume=state,
        )
    with pytest.raises(InputError, match=r"inputs of request 1: was .*'a'.*, is .*'c'"):
        batch([{"prompt": "c", "seed": 1}], resume=state)
    second = batch([REQUESTS[0], REQUESTS[1]], resume=state)
    assert second.done_before == (1,), "requests may be added"
    assert {number for _, number, _ in second.traces} == {2}


def test_a_damaged_state_is_ignored(tmp_path: Path) -> None:
    request = Journal(tmp_path).request(1)
    request.keep("encode", {"embeds": {"n": 3}})
    assert request.values("encode") == {"embeds": {"n": 3}}
    file = tmp_path / "1" / "encode.value"
    file.write_bytes(file.read_bytes()[:-1])
    assert request.values("encode") is None


def test_a_state_of_an_older_form_is_refused_with_what_to_do(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.request(1).keep("encode", {"embeds": {"n": 3}})
    (tmp_path / "facts.json").write_text("{}")
    with pytest.raises(
        InputError, match=r"has no readable dependencies\.json; remove the folder to start over"
    ):
        journal.require({"device": "sim"})


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    batch: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="resume state cannot be written"):
        batch(REQUESTS[:1], resume=tmp_path / "file" / "state")


@pytest.mark.sweep("more")
@pytest.mark.parametrize("target", ["3.png", "2/done.json"])
def test_killed_between_writing_and_renaming_it_resumes_and_leaves_no_other_file(
    batch: Any, sink: Any, killed_before: Any, whole: dict[str, bytes], target: str, tmp_path: Path
) -> None:
    def work() -> Any:
        return batch(REQUESTS, sink=sink(tmp_path / "out"), resume=tmp_path / "state")

    killed_before(work, target)
    assert list(tmp_path.rglob(f".{Path(target).name}.new-*"))
    work()
    assert pictures(tmp_path / "out") == whole
    assert not list(tmp_path.rglob(".*"))


def test_one_process_at_a_time_may_resume(batch: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(InputError, match="another process is running this batch"):
        batch(REQUESTS[:1], resume=tmp_path)
    journal.close()
    assert batch(REQUESTS[:1], resume=tmp_path).outputs
    assert batch(REQUESTS[:1], resume=tmp_path).done_before == (1,)


def test_the_state_of_a_finished_request_is_deleted(batch: Any, tmp_path: Path) -> None:
    batch(REQUESTS[:1], resume=tmp_path)
    (tmp_path / "1" / "denoise.value").write_bytes(b"left by a kill after done.json")
    batch(REQUESTS[:1], resume=tmp_path)
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["done.json"]
