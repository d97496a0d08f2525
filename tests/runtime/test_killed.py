"""Killed processes, a full disk, a cgroup with little RAM: no partial files count, and the next run
works."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from whole_pipelines import TinyPipeline, pixels, planned

from graphrun.errors import InputError, PlanError
from graphrun.host_ram import host_ram_bytes
from graphrun.model.choices import apply_choices
from graphrun.model.problem import Problem
from graphrun.report.outputs import save_outputs
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import execute
from graphrun.runtime.spool import PREFIX, Spool
from graphrun.temporary import remove_stale
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of


class OnDisk:
    """FLUX tiny, its random weights spooled to disk: a run that writes, reads, computes and
    saves a picture."""

    def __init__(self) -> None:
        self.whole = TinyPipeline("flux-tiny", {"steps": 1, "height": 32, "width": 32})
        smallest = self.whole.smallest()
        components = []
        for c in smallest.components:
            v = c.variants[0]
            read_seconds = tuple(b / smallest.hardware.disk_bytes_per_second for b in v.block_bytes)
            variant = replace(
                v,
                backing_store="disk",
                host_bytes=2 * max(v.block_bytes),
                disk_seconds=read_seconds,
                stored_bytes=v.host_bytes,
            )
            components.append(replace(c, variants=(variant,)))
        self.problem: Problem = replace(smallest, components=tuple(components))
        self.plan = planned(self.problem)

    def run(self, root: Path, picture: Path) -> None:
        graph, device, spool = self.whole.graph, open_device(self.problem), Spool(root)
        host = Host.of_graph(graph, apply_choices(self.problem, self.plan), device, spool=spool)
        stages = stages_for(self.plan, graph, self.whole.inputs, device, host)
        trace = follow(solution_of(self.problem, self.plan), host, device, stages)
        spool.close()
        save_outputs(trace.outputs, picture)
        self.image = pixels(trace.outputs["image"])


@pytest.fixture(scope="module")
def case() -> OnDisk:
    return OnDisk()


def exit_code(work: Callable[[], None], seconds: float | None = None) -> int | None:
    """The exit code of a child that does ``work``; it is killed after ``seconds``."""
    child = get_context("fork").Process(target=work)
    child.start()
    child.join(seconds)
    child.kill()
    child.join()
    return child.exitcode


def kill_at(case: OnDisk, folder: Path, moments: int, seed: int = 4) -> None:
    """Runs are killed at random moments. These count processor time, which other processes on the
    machine do not change."""
    root, picture = folder / "tmp", folder / "picture.png"
    root.mkdir()
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert exit_code(lambda: case.run(root, picture)) == 0
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole_run = (
        usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    )
    expected = picture.read_bytes()
    assert not list(root.iterdir())
    folder_count = kill_count = 0
    for moment in random.Random(seed).sample(range(1000), moments):

        def mortal(moment: int = moment) -> None:
            signal.setitimer(signal.ITIMER_PROF, max(1e-6, whole_run * moment / 1000))
            case.run(root, picture)

        kill_count += exit_code(mortal) == -signal.SIGPROF
        folder_count += bool(list(root.glob(f"{PREFIX}*")))
        assert picture.read_bytes() == expected, "whole, or not there"
        assert len(list(root.glob(f"{PREFIX}*"))) <= 1, "each run removes what the one before left"
    assert kill_count > moments // 2
    assert folder_count > 0
    case.run(root, picture)
    assert not list(root.iterdir())
    assert np.array_equal(case.image, case.whole.image)


def test_a_run_that_is_killed_leaves_nothing_that_counts_and_the_next_one_works(
    case: OnDisk, tmp_path: Path
) -> None:
    kill_at(case, tmp_path, 6)


@pytest.mark.sweep("faults")
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_ten_other_moments(case: OnDisk, tmp_path: Path, seed: int) -> None:
    kill_at(case, tmp_path, 10, seed)


def test_a_folder_that_a_process_still_uses_stays(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    folder = spool._create_folder()
    assert remove_stale(tmp_path, PREFIX) == []
    assert folder.is_dir()
    stale = tmp_path / f"{PREFIX}{2**22 + 1}-gone"
    stale.mkdir()
    assert remove_stale(tmp_path, PREFIX) == [stale]
    spool.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_is_an_error_that_says_how_much_and_leaves_nothing(
    case: OnDisk, tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk: writing fails in the middle of a
    block."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            case.run(tmp_path, tmp_path / "picture.png")
        except InputError as error:
            text = str(error)
            assert "cannot be written to" in text
            assert "make room, or plan with less disk" in text
            os._exit(7)

    assert exit_code(work) == 7
    names = [path.name for path in tmp_path.glob("**/*.safetensors")]
    assert names == ["text_encoder.safetensors"], "what did not fit whole is not there"
    assert len(remove_stale(tmp_path, PREFIX)) == 1
    assert not list(tmp_path.iterdir())


def test_s3_4_a_group_with_less_ram_than_the_plan_holds_is_refused_before_anything_is_loaded(
    case: OnDisk, tmp_path: Path
) -> None:
    whole, problem = case.whole, case.whole.smallest()
    plan = planned(problem)
    (tmp_path / "memory.max").write_text(str(simulate(problem, plan).host_peak_bytes - 1))
    has = host_ram_bytes(root=tmp_path, membership=tmp_path / "none")
    device = open_device(problem)
    with pytest.raises(
        PlanError,
        match=r"needs .* of RAM, and this machine, or this process's cgroup, has .*"
        r"plan again with --ram",
    ):
        execute(solution_of(problem, plan), whole.graph, whole.inputs, device, ram_bytes=has)
    assert device.arenas.nbytes("arenas") == 0
    assert device.machine.allocations == 0  # type: ignore[attr-defined]
