"""Runs of a few stages of a graph on one device, by a session plan for them; what other stages make
is handed in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from graphrun.batch.schedule import Segment
from graphrun.runtime.devices.device import Device
from graphrun.runtime.executor import Session, refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import run_to_the_end
from graphrun.runtime.run import Progress
from graphrun.trace import Trace


class Running(contextlib.ExitStack):
    """A session of ``segment`` on ``device``. A context manager. Raises PlanError where the plan is
    not one for the segment.

    ``host``: backing stores of the whole graph, in place of ``modules``; the segment uses its part
    of it.
    """

    def __init__(
        self,
        segment: Segment,
        device: Device,
        modules: Mapping[str, Any] | None = None,
        host: Host | None = None,
    ) -> None:
        super().__init__()
        refuse_unfit(segment.solution, segment.graph)
        self.segment, self.device = segment, device
        chosen = segment.solution.chosen
        self._host = (
            host.part(chosen)
            if host is not None
            else Host.of_graph(segment.graph, chosen, device, modules)
        )
        self._session = self.enter_context(Session(segment.solution, self._host, device))

    @property
    def loaded_ahead(self) -> bool:
        """Whether the next run finds what `load_ahead` loaded."""
        return self._session.loaded_ahead

    def load_ahead(self) -> None:
        """Loads what the next run begins with, where that is a first run
        (`graphrun.runtime.executor.Session.load_ahead`)."""
        self._session.load_ahead()

    def run(
        self,
        inputs: Mapping[str, Any],
        progress: Progress | None = None,
        tell: Callable[[str], None] | None = None,
        **more: Any,
    ) -> Trace:
        """One run with resolved ``inputs``; ``more`` as for `graphrun.ops.Stages`, such as
        ``precomputed`` values, and ``inputs_of`` some of the stages, where others are left out.

        Raises what `graphrun.runtime.recovery.run_to_the_end` raises; the next run then starts with
        an empty device.
        """
        solution, session = self.segment.solution, self._session
        if (
            solution.problem.runs == 1 and not session.loaded_ahead
        ):  # a plan for one run: the next starts with an empty device
            session.close()
        stages = stages_for(
            solution.plan, self.segment.graph, inputs, self.device, self._host, **more
        )
        return run_to_the_end(
            solution, stages, self._host, self.device, progress, tell=tell, session=session
        )
