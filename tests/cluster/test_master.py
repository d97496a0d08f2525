"""The master program finds what trying all assignments finds, in pure numbers; the simulator of a
stream agrees with its rate."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from campaign import sampled
from random_clusters import Case, best_latency, best_rate, random_case

from graphrun.cluster import master
from graphrun.cluster.columns import DeviceClass, Pricing
from graphrun.cluster.machines import Cluster, Link
from graphrun.cluster.master import Unplaceable, assignments_for
from graphrun.cluster.placement import Assignment, Column, Objective, Placement, violations
from graphrun.cluster.stream import finish_seconds, steady_rate, with_figures

CASES = sampled(range(300), range(30), "cluster", of_all=90)


def case_of(number: int) -> Case:
    """A case of the sweep, or one of those that are quick."""
    return random_case(number, *((3, 3) if number < 30 else (4, 4)))


def placed(case: Case, objective: Objective, items: int = 100) -> Placement | None:
    try:
        pricing = case.pricing(cold=items == 1, has_gaps=objective == "throughput")
        assignments = assignments_for(objective, case.cluster, pricing, case.values)
    except Unplaceable:
        return None
    placement = with_figures(case.placement(objective, assignments, items))
    assert not violations(placement)
    return placement


def unlimited(case: Case) -> Case:
    """``case`` with links that limit nothing."""
    links = tuple(replace(link, bytes_per_second=1e12) for link in case.cluster.links)
    return replace(case, cluster=replace(case.cluster, links=links))


@pytest.mark.parametrize("number", CASES)
def test_the_most_items_per_second_are_those_of_the_best_of_all_assignments(number: int) -> None:
    case = unlimited(case_of(number))
    placement = placed(case, "throughput")
    assert (placement.items_per_second if placement is not None else 0.0) == pytest.approx(
        best_rate(case), rel=1e-5
    )


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("items", [1, 100])
def test_the_shortest_time_of_one_item_is_that_of_the_best_of_all_chains(
    number: int, items: int
) -> None:
    case = case_of(number)
    placement = placed(case, "latency", items)
    value = placement.latency_seconds if placement is not None else float("inf")
    assert value == pytest.approx(best_latency(case, cold=items == 1), rel=1e-5)


@pytest.mark.parametrize("number", CASES)
def test_a_simulated_stream_has_the_predicted_rate(number: int) -> None:
    placement = placed(case_of(number), "throughput")
    if placement is not None:
        assert steady_rate(placement) == pytest.approx(placement.items_per_second, rel=0.02)


@pytest.mark.parametrize("number", range(5))
def test_hosts_whose_memory_is_a_row_come_out_the_same(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master, "MOST_CONFIGURATIONS", 0)
    case = unlimited(case_of(number))
    placement = placed(case, "throughput")
    assert (placement.items_per_second if placement is not None else 0.0) == pytest.approx(
        best_rate(case), rel=1e-5
    )


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("number", range(20))
def test_up_to_four_devices_of_a_host_hold_a_column_together(number: int) -> None:
    case = replace(unlimited(random_case(number, 4 if number < 5 else 3, 2)), max_team=4)
    placement = placed(case, "throughput")
    assert (placement.items_per_second if placement is not None else 0.0) == pytest.approx(
        best_rate(case), rel=1e-5
    )
    latency_placement = placed(case, "latency")
    assert (
        latency_placement.latency_seconds if latency_placement is not None else float("inf")
    ) == pytest.approx(best_latency(case, cold=False), rel=1e-5)


def test_devices_are_put_together_where_that_is_better_and_only_there() -> None:
    optima = [
        placed(replace(case_of(number), max_team=max_team), "latency")
        for number in range(12)
        for max_team in (1, 2)
    ]
    pairs = list(zip(optima[::2], optima[1::2], strict=True))
    assert any(
        team is not None and any(assignment.secondaries for assignment in team.assignments)
        for _, team in pairs
    )
    for single, team in pairs:
        if single is not None and team is not None:
            assert team.latency_seconds < single.latency_seconds or not any(
                assignment.secondaries for assignment in team.assignments
            )


def test_hosts_without_a_link_exchange_nothing() -> None:
    cases = [case for case in map(case_of, range(30)) if len(case.cluster.hosts) > 1][:5]
    for case in cases:
        parts = [replace(case, cluster=Cluster((host,))) for host in case.cluster.hosts]
        placement = placed(replace(case, cluster=replace(case.cluster, links=())), "throughput")
        rate = placement.items_per_second if placement is not None else 0.0
        assert rate == pytest.approx(sum(map(best_rate, parts)), rel=1e-5)


def test_102_devices_are_counted_and_not_named() -> None:
    """The rate of 34 equal hosts on a fast network is at least 34 times that of one."""
    case = next(
        case
        for case in map(case_of, range(30))
        if len(case.cluster.devices) == 3 and len(case.cluster.hosts) == 1
    )
    (host,) = case.cluster.hosts
    hosts = tuple(
        replace(
            host,
            name=f"h{n}",
            devices=tuple(replace(device, host=f"h{n}") for device in host.devices),
        )
        for n in range(34)
    )
    link = Link(tuple(machine.name for machine in hosts), 1e12, 0.0)
    placement = placed(replace(case, cluster=Cluster(hosts, (link,))), "throughput")
    assert placement is not None
    assert placement.items_per_second >= 34 * best_rate(case) * (1 - 1e-5)


def test_only_columns_that_may_win_are_priced() -> None:
    """Of a device that is a hundred times slower than the others, bounds suffice."""
    case = next(
        case
        for case in map(case_of, range(30))
        if len({device.hardware.name for device in case.cluster.devices}) == 2
    )
    slow = case.cluster.devices[0].hardware.name
    slower = {
        key: seconds * (100 if key[0] == slow else 1) for key, seconds in case.compute.items()
    }
    priced: list[str] = []

    def price(kind: DeviceClass, stages: tuple[str, ...], share: float) -> Column | None:
        priced.append(kind.hardware.name)
        return case.price(kind, stages, share)

    pricing = Pricing(case.stages, price, lambda kind, stage, _: slower[kind.hardware.name, stage])
    assignments_for("latency", case.cluster, pricing, case.values)
    assert priced
    assert slow not in priced


def replicas_of(seconds: list[tuple[float, float, float]], items: int) -> Placement:
    """A placement of whole graphs on devices with (cold, ahead, steady) seconds."""
    case = random_case(0, 3, 3)
    example = case.cluster.devices[0]
    devices = tuple(replace(example, id=number) for number in range(len(seconds)))
    host = replace(case.cluster.hosts[0], devices=devices)
    assignments = tuple(
        Assignment(device, Column(case.stages, *times, 0, 0))
        for device, times in zip(devices, seconds, strict=True)
    )
    cluster = replace(case.cluster, hosts=(host,), links=())
    return Placement("throughput", items, case.stages, case.values, cluster, assignments)


@pytest.mark.parametrize("number", range(60))
def test_replicas_finish_as_early_as_any_assignment_of_items_and_no_subset_is_earlier(
    number: int,
) -> None:
    """The optimum: the least time by which all devices together can finish all items."""
    generator = random.Random(number)
    items, seconds = generator.randint(1, 50), []
    for _ in range(generator.randint(2, 6)):
        steady, load = generator.uniform(1, 12), generator.uniform(0, 5)
        seconds.append((load + steady * generator.uniform(1, 4), load, steady))
    ends = sorted(
        cold + count * steady for cold, _, steady in seconds for count in range(items)
    )  # of each item that a device may have
    finish = max(finish_seconds(replicas_of(seconds, items), items))
    assert finish == pytest.approx(ends[items - 1])
    for index in range(len(seconds)):
        subset = [*seconds[:index], *seconds[index + 1 :]]
        assert finish <= max(finish_seconds(replicas_of(subset, items), items)) + 1e-9
