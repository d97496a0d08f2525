"""The plans of requests, made by the planner process, and the share of the budgets that each graph
gets."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphrun.serve.bodies import PictureRequest, RequestShape, shape_of
from graphrun.serve.catalog import Catalog, GraphVariant
from graphrun.serve.child import Child
from graphrun.serve.errors import Refused
from graphrun.serve.line import Line, QueueEntry
from graphrun.serve.log import log
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape, plan_forever
from graphrun.serve.settings import Settings
from graphrun.serve.shares import RECENT, SHARES, WHOLE, Arrangement, best

# plans in memory; the least recently used ones are read from the cache folder again
KEPT_SHAPES = 256
PLANNING = 8  # shapes that may wait to be planned
PLAN_SECONDS = 5.0  # to plan a shape, until one is measured
RESTART_SECONDS = 1.0  # until the planner process restarts
# weight of the latest measurement in a running mean: after three measurements, all earlier ones
# together weigh half (0.8 ** 3 = 0.51)
LATEST_WEIGHT = 0.2

ShapeKey = tuple[RequestShape, float]
"""A shape, and the share of the budgets within which it is planned."""


class Plans:
    """Plans by shape and share, cached.

    When the planner has checked batches of a shape, the entries of ``line`` with this shape get the
    new cost.
    """

    def __init__(self, settings: Settings, catalog: Catalog, metrics: Metrics, line: Line) -> None:
        self._settings, self._metrics, self._line = settings, metrics, line
        self._variants: Mapping[str, GraphVariant] = {}
        self.defaults: Mapping[str, RequestShape] = {}
        self.use(catalog)
        self.shapes: OrderedDict[ShapeKey, asyncio.Future[PlannedShape]] = OrderedDict()
        # graph -> share of the budgets within which its weights stay on the device
        self.shares: Arrangement = {}
        self._recent: deque[str] = deque(maxlen=RECENT)  # graphs of the latest runs
        self._plan_seconds = PLAN_SECONDS
        self._closed = False
        self._planner: Child | None = None
        self._batch_key: ShapeKey | None = None  # the shape that the planner checks for batches

    def use(self, catalog: Catalog) -> None:
        """Plan the graphs of ``catalog`` from now on."""
        self._variants = variants = catalog.variants
        self.defaults = {name: default_shape(variant) for name, variant in variants.items()}

    def start(self) -> None:
        """Start the planner process, and plan each graph at its defaults."""
        self._start_planner()

    def close(self) -> None:
        self._closed = True
        if self._planner is not None:
            self._planner.stop()

    @property
    def lacks(self) -> list[str]:
        """Why graphs have no plan at their defaults; empty if each has one."""
        reasons = {name: self._lack((shape, WHOLE)) for name, shape in self.defaults.items()}
        return [f"{name} {reason}" for name, reason in reasons.items() if reason]

    def _lack(self, key: ShapeKey) -> str:
        future = self.shapes.get(key)
        if future is None or not future.done():
            return "is not planned yet"
        return "" if future.exception() is None else "has no plan"

    @property
    def _is_idle(self) -> bool:
        return self._planner is not None and all(future.done() for future in self.shapes.values())

    async def plan(self, request: PictureRequest) -> tuple[PlannedShape, float]:
        """Return the plan for ``request``, and its share of the budgets. Raises Refused as
        `shape`, and 422 if nothing fits."""
        variant = GraphVariant.of(request)
        plan = await asyncio.shield(self.shape(request.shape, variant, request.runs[0]))
        share = self.shares.get(request.graph, WHOLE)
        if share == WHOLE:
            return plan, share
        try:
            future = self.shape(request.shape, variant, request.runs[0], share)
            return await asyncio.shield(future), share
        except Refused:
            return plan, WHOLE  # the request fits the whole budgets

    def note_seconds(self, seconds: float) -> None:
        """Record that a request waited ``seconds`` for its plan."""
        if seconds > 0.05:  # otherwise the plan existed
            self._plan_seconds += LATEST_WEIGHT * (seconds - self._plan_seconds)

    def shape(
        self, shape: RequestShape, variant: GraphVariant, inputs: Any, share: float = WHOLE
    ) -> asyncio.Future[PlannedShape]:
        """Return the plan of a shape within ``share`` of the budgets, cached.

        ``variant`` and ``inputs``: of any request of this shape. Raises Refused: 429 if too many
        shapes wait for a plan, 503 while the planner restarts.
        """
        key = shape, share
        if key not in self.shapes:
            pending_count = sum(not future.done() for future in self.shapes.values())
            if pending_count >= PLANNING + len(self._variants):
                text = f"requests of {pending_count} other sizes wait to be planned: try again"
                wait = pending_count * self._plan_seconds
                raise Refused(429, text, "busy_planning", retry_seconds=wait)
            if self._planner is None:
                text = "the planner has ended, and is started again: try again"
                raise Refused(503, text, "interrupted", retry_seconds=RESTART_SECONDS)
            self.shapes[key] = asyncio.get_running_loop().create_future()
            self.shapes[key].add_done_callback(ignore_error)
            self._ask("plan", key, variant, inputs, share=share)
        self.shapes.move_to_end(key)
        spare = [
            old
            for old, future in self.shapes.items()
            if future.done() and old[0] not in self.defaults.values()
        ]
        for old in spare[: max(0, len(self.shapes) - KEPT_SHAPES)]:
            del self.shapes[old]
        return self.shapes[key]

    def plan_defaults(self) -> None:
        """Plan each graph at its defaults."""
        for name in self._variants:
            self._plan_default(name)

    def _plan_default(self, name: str, share: float = WHOLE) -> None:
        self.plan_default(self._variants[name], share)

    def plan_default(
        self, variant: GraphVariant, share: float = WHOLE
    ) -> asyncio.Future[PlannedShape]:
        """Return the plan of ``variant`` at its defaults. Raises Refused as `shape`."""
        shape, inputs = default_shape(variant), variant.graph.for_planning({})
        return self.shape(shape, variant, inputs, share)

    def _ask(
        self,
        kind: str,
        key: ShapeKey,
        variant: GraphVariant,
        inputs: Mapping[str, Any],
        **fields: Any,
    ) -> None:
        """Send a message about the shape ``key`` to the planner."""
        assert self._planner is not None
        sizes = {name: inputs[name] for name, _ in key[0].settings}
        self._planner.send(kind, key=key, variant=variant, inputs=sizes, **fields)

    def plan_batch(self, entry: QueueEntry) -> None:
        """Ask an idle planner whether a batch of runs like ``entry`` is faster."""
        key = _key(entry)
        alike_runs = sum(other.runs for other in self._line.entries if other.shape == entry.shape)
        if alike_runs < 2 or self._batch_key is not None or not self._is_idle:
            return
        plan = self._planned(key)
        if plan is not None and not plan.has_batch_plan:
            self._batch_key = key
            request: PictureRequest = entry.item.request
            variant = GraphVariant.of(request)
            self._ask("plan_batch", key, variant, request.runs[0], budgets=plan.budgets)

    def _planned(self, key: ShapeKey) -> PlannedShape | None:
        """Return the plan of the shape ``key``; None if it is not planned, or refused."""
        future = self.shapes.get(key)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def arrange(self, graph: str) -> None:
        """Record a run of ``graph``, and decide which graphs keep their weights on the device.
        Waiting requests keep their plans."""
        self._recent.append(graph)
        names = sorted(set(self._recent))
        keys = {
            (name, share): (self.defaults[name], share)
            for name in names
            for share in (WHOLE, *SHARES)
        }
        unplanned = [pair for pair, key in keys.items() if key not in self.shapes]
        if unplanned and len(names) > 1 and self._is_idle:
            # one at a time, so that requests wait for at most one such plan
            self._plan_default(*unplanned[0])
        costs = {
            pair: plan.cost
            for pair, key in keys.items()
            if (plan := self._planned(key)) is not None
        }
        if all((name, WHOLE) in costs for name in names):
            self.shares = best(self.shares, tuple(self._recent), costs)
        for name in self._variants:
            self._metrics.share.labels(name).set(self.shares.get(name, WHOLE))

    def _start_planner(self) -> None:
        if not self._closed:
            self._planner = Child(plan_forever, self._settings, self.hear, self._planner_died)
            self.plan_defaults()

    def hear(self, kind: str, key: ShapeKey, **content: Any) -> None:
        """Take a message of the planner about the shape ``key``."""
        future = self.shapes.get(key)
        if kind == "batch_plan":
            self._batch_key = None
            # the shape may have been evicted from the cache meanwhile, and asked for again
            if content["parts"] is not None and (plan := self._planned(key)) is not None:
                self._take_batch_plan(key, plan, content["parts"])
            return
        is_planned = kind == "planned"
        self._metrics.plans.labels("planned" if is_planned else "refused").inc()
        shape, share = key
        answer = content["shape"].verdict if is_planned else content["message"]
        loras = ", ".join(f"{use.name} {use.scale:g}" for use in shape.loras)
        entries = {**dict(shape.settings), "loras": loras, "share": share, "answer": answer}
        log(kind, graph=shape.graph, **entries)
        if future is None or future.done():
            return
        if is_planned:
            future.set_result(content["shape"])
        else:
            future.set_exception(Refused(**content))

    def _take_batch_plan(
        self, key: ShapeKey, plan: PlannedShape, parts: Mapping[tuple[str, ...], Any]
    ) -> None:
        """Set the seconds of a batch's segments, by their stages: in the plan and in the queue."""
        cost = replace(plan.cost, segments=tuple(parts.values()), stages=tuple(parts))
        self.shapes[key] = asyncio.get_running_loop().create_future()
        self.shapes[key].set_result(replace(plan, cost=cost, has_batch_plan=True))
        for entry in self._line.entries:
            if _key(entry) == key:
                entry.cost = cost

    def _planner_died(self) -> None:
        exit_code = None if self._planner is None else self._planner.process.exitcode
        log("planner ended", exit_code=exit_code)
        self._planner = self._batch_key = None
        error = Refused(
            503,
            "planning was interrupted: try again",
            "interrupted",
            retry_seconds=self._plan_seconds,
        )
        # the next request of each shape plans it again
        for key in [key for key, future in self.shapes.items() if not future.done()]:
            self.shapes.pop(key).set_exception(error)
        asyncio.get_running_loop().call_later(RESTART_SECONDS, self._start_planner)


def default_shape(variant: GraphVariant) -> RequestShape:
    """Return the shape of requests to ``variant`` at its defaults."""
    graph = variant.graph
    return shape_of(graph, graph.for_planning({}), variant.edition, variant.loras)


def ignore_error(future: asyncio.Future[Any]) -> None:
    """Without this, asyncio logs an exception that nobody awaits."""
    if not future.cancelled():
        future.exception()


def _key(entry: QueueEntry) -> ShapeKey:
    return entry.item.request.shape, entry.group[1]
