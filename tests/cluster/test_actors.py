"""Actors of a local Ray on simulated devices: bits, order, times of the plan; what is killed or
lost is done again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from placing import BUDGET, SMALL, cluster_of, placed, ran_by, requests

import graphrun

pytestmark = pytest.mark.sweep("cluster")
KILLS, DRIVER_KILLS, ITEMS = 40, 10, 12
LATEST_SECONDS = 2.0  # after the start of a run at which its actor is killed


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A local Ray, started once."""
    from graphrun.cluster.actors import ray_connection

    with ray_connection(cluster_of()) as ray:
        yield ray


def pictures(batch: Any) -> list[tuple[int, bytes]]:
    return [(number, outputs["image"].tobytes()) for number, outputs in batch.outputs.items()]


def one_device(graph: Any, count: int, cache: Path) -> Any:
    return graphrun.run_many(
        graph, requests(count), common=SMALL, cache=cache, reuse="none", **BUDGET
    )


def test_three_actors_have_the_bits_of_one_device_in_order_at_the_planned_rate(
    ray: Any, flux: Any, cached_dry_runs: Path, record_property: Any
) -> None:
    from graphrun.cluster.actors import Actors
    from graphrun.cluster.flow import segments_of

    placement, single = placed(flux, 24, cached_dry_runs), one_device(flux, 24, cached_dry_runs)
    with Actors(ray, segments_of(flux, placement), placement) as crew:
        batch = ran_by(flux, placement, crew, requests(24))
    assert pictures(batch) == pictures(single)
    assert batch.seconds == pytest.approx(placement.seconds, rel=0.05)
    problem = graphrun.estimate(flux, inputs=SMALL, cache=cached_dry_runs, **BUDGET)
    singly = 24 * graphrun.plan(problem, cache=cached_dry_runs).simulation.seconds
    record_property(
        "figures",
        {
            "items": 24,
            "seconds": batch.seconds,
            "planned": placement.seconds,
            "one": single.seconds,
            "singly": singly,
        },
    )
    assert batch.seconds < single.seconds < singly


def test_an_actor_encodes_and_decodes_while_another_denoises_at_the_planned_rate(
    ray: Any, flux: Any, cached_dry_runs: Path, record_property: Any
) -> None:
    from graphrun.cluster.actors import Actors
    from graphrun.cluster.flow import segments_of

    placement = placed(flux, 24, cached_dry_runs, (("encode", "decode"), ("denoise",)))
    single = one_device(flux, 24, cached_dry_runs)
    with Actors(ray, segments_of(flux, placement), placement) as crew:
        batch = ran_by(flux, placement, crew, requests(24))
    assert pictures(batch) == pictures(single)
    assert batch.seconds == pytest.approx(placement.seconds, rel=0.05)
    rate = 1 / placement.items_per_second
    assert (batch.seconds - placement.latency_seconds) / 23 == pytest.approx(rate, rel=0.05)
    record_property(
        "figures",
        {
            "items": 24,
            "seconds": batch.seconds,
            "planned": placement.seconds,
            "one": single.seconds,
        },
    )
    assert batch.seconds < single.seconds


def test_an_actor_holds_two_devices_after_actors_that_held_one_each(
    ray: Any, flux: Any, cached_dry_runs: Path
) -> None:
    from graphrun.cluster.actors import Actors
    from graphrun.cluster.flow import segments_of

    gapped, single = placed(flux, 4, cached_dry_runs), one_device(flux, 4, cached_dry_runs)
    team = placed(flux, 4, cached_dry_runs, (("denoise", "decode"), ("encode",)), team_sizes=(2, 1))
    with Actors(ray, segments_of(flux, gapped), gapped) as crew:
        assert pictures(ran_by(flux, gapped, crew, requests(1))) == pictures(single)[:1]
        crew.switch_to(segments_of(flux, team), team)
        batch = ran_by(flux, team, crew, requests(4))
        pid = ray.get(crew._actors[0].__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        assert pictures(ran_by(flux, team, crew, requests(1))) == pictures(single)[:1]
    assert pictures(batch) == pictures(single)
    assert batch.seconds == pytest.approx(team.seconds, rel=0.05)
    assert {lane.device for lane in batch.lanes} == {"a/0+a/1", "b/2"}


def test_actors_killed_at_any_moment_do_every_item_once_with_the_same_bits(
    ray: Any, flux: Any, cached_dry_runs: Path
) -> None:
    from graphrun.cluster.actors import Actors
    from graphrun.cluster.flow import segments_of

    class Killing(Actors):
        """Kills the actor of a run some time after the run began: before, in or after it. Now and
        then a value is lost."""

        kill_counts = [0, 0, 0]

        def begin(self, worker: int, visits: Sequence[Any]) -> Any:
            process = ray.get(self._actors[worker].__ray_call__.remote(lambda _: os.getpid()))
            if chance.random() < 0.1 and visits[0].values:
                visits, loss_counts[0] = (
                    [visits[0]._replace(values=[reference, *visits[0].values[1:]]), *visits[1:]],
                    loss_counts[0] + 1,
                )
            ticket = super().begin(worker, visits)
            if (
                sum(self.kill_counts) < KILLS
                and self.kill_counts[worker] <= min(self.kill_counts) + 1
                and chance.random() < 0.7
            ):
                self.kill_counts[worker] += 1
                threading.Timer(LATEST_SECONDS * chance.random(), kill, [process]).start()
            return ticket

    def kill(process: int) -> None:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:  # killed by the one before
            rerun_numbers.append(process)

    class Owner:
        def put(self) -> list[Any]:
            import ray

            return [ray.put(b"")]

    owner = ray.remote(Owner).options(num_cpus=0).remote()
    (reference,) = ray.get(owner.put.remote())
    ray.kill(owner)  # and with it what it owns
    chance, rerun_numbers, loss_counts = random.Random(7), list[int](), [0]
    placement, single = (
        placed(flux, ITEMS, cached_dry_runs),
        one_device(flux, ITEMS, cached_dry_runs),
    )
    while sum(Killing.kill_counts) < KILLS:
        with Killing(ray, segments_of(flux, placement), placement) as crew:
            batch = ran_by(flux, placement, crew, requests(ITEMS))
        assert pictures(batch) == pictures(single)
        assert batch.errors == {}
    assert all(Killing.kill_counts)
    assert loss_counts[0]


def test_a_driver_killed_at_any_moment_goes_on_and_ends_with_the_same_files(
    ray: Any, flux: Any, cached_dry_runs: Path, tmp_path: Path
) -> None:
    chance, address = random.Random(11), ray.get_runtime_context().gcs_address
    single = dict(pictures(one_device(flux, ITEMS, cached_dry_runs)))
    script = Path(__file__).parent / "driver.py"
    command = [
        sys.executable,
        str(script),
        address,
        str(tmp_path),
        str(cached_dry_runs),
        str(ITEMS),
    ]

    def driven(runs: int | None) -> int:
        """Runs that the driver made before it ended, by itself or killed after ``runs`` of them."""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for count, _ in enumerate(driver.stdout, 1):
                if count == runs:
                    driver.kill()
                    return count
            assert driver.wait() == 0
            return count

    run_count = sum(driven(chance.randrange(1, 4)) for _ in range(DRIVER_KILLS)) + driven(None)
    outputs = {
        number: np.asarray(Image.open(tmp_path / f"{number}.png")).tobytes() for number in single
    }
    assert outputs == single
    assert run_count <= len(placed(flux, ITEMS, cached_dry_runs).assignments) * (
        ITEMS + DRIVER_KILLS
    ), "at most what ran at a kill runs again"
