"""The master program finds what trying all assignments finds, in pure numbers; the simulator of a stream agrees with its rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from campaign import sampled
from random_clusters import Case, best_latency, best_rate, random_case

from graphrun.cluster.master import Unplaceable, assignments_for
from graphrun.cluster.placement import Objective, Placement, violations
from graphrun.cluster.stream import steady_rate, with_figures

CASES = sampled(range(300), range(30), "cluster")


def case_of(number: int) -> Case:
    """A case of the sweep, or one of those that are quick."""
    return random_case(number, *((3, 3) if number < 30 else (4, 4)))


def placed(case: Case, objective: Objective, items: int = 100) -> Placement | None:
    try:
        found = assignments_for(objective, case.cluster, case.pricing(cold=items == 1), case.values)
    except Unplaceable:
        return None
    placement = with_figures(case.placement(objective, found, items))
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
    assert (placement.items_per_second if placement is not None else 0.0) == pytest.approx(best_rate(case), rel=1e-5)


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("items", [1, 100])
def test_the_shortest_time_of_one_item_is_that_of_the_best_of_all_chains(number: int, items: int) -> None:
    case = case_of(number)
    placement = placed(case, "latency", items)
    found = placement.latency_seconds if placement is not None else float("inf")
    assert found == pytest.approx(best_latency(case, cold=items == 1), rel=1e-5)


@pytest.mark.parametrize("number", CASES)
def test_a_simulated_stream_has_the_predicted_rate(number: int) -> None:
    placement = placed(case_of(number), "throughput")
    if placement is not None:
        assert steady_rate(placement) == pytest.approx(placement.items_per_second, rel=0.02)
