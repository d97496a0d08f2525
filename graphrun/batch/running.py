"""Run some stages of a graph on one device by a session plan, with given values of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from graphrun.batch.schedule import StageSegment
from graphrun.hook import ProgressCallback
from graphrun.runtime.devices.device import Device
from graphrun.runtime.executor import PlanSession, refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import run_to_the_end
from graphrun.runtime.spool import Spool
from graphrun.trace import Trace


class Running(contextlib.ExitStack):
    """A session of ``segment`` on ``device``. A context manager.

    ``host``: backing stores of the whole graph, used instead of ``modules``; the segment uses its
    part. ``spool``: writes files of weights; default: temporary ones. Raises PlanError
    if the plan is not for the segment.
    """

    def __init__(
        self,
        segment: StageSegment,
        device: Device,
        modules: Mapping[str, Any] | None = None,
        host: Host | None = None,
        spool: Spool | None = None,
    ) -> None:
        super().__init__()
        refuse_unfit(segment.solution, segment.graph)
        self.segment, self.device = segment, device
        selection = segment.solution.chosen
        self._host = (
            host.restricted_to(selection)
            if host is not None
            else Host.of_graph(segment.graph, selection, device, modules, spool)
        )
        self._session = self.enter_context(PlanSession(segment.solution, self._host, device))

    @property
    def loaded_ahead(self) -> bool:
        """Whether the next run finds the blocks that `load_ahead` loaded."""
        return self._session.loaded_ahead

    def load_ahead(self) -> None:
        """Load the blocks of a first run ahead (`graphrun.runtime.executor.Session.load_ahead`)."""
        self._session.load_ahead()

    def run(
        self,
        inputs: Mapping[str, Any],
        progress: ProgressCallback | None = None,
        tell: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Trace:
        """Run once with resolved ``inputs``.

        ``options``: arguments of `graphrun.ops.Stages`, such as ``precomputed`` values, and
        ``inputs_of`` some stages, which skips the others. Raises the errors of
        `graphrun.runtime.recovery.run_to_the_end`; the next run then starts with an empty device.
        """
        solution, session = self.segment.solution, self._session
        # a plan for one run starts with an empty device
        if solution.problem.runs == 1 and not session.loaded_ahead:
            session.close()
        stages = stages_for(
            solution.plan, self.segment.graph, inputs, self.device, self._host, **options
        )
        return run_to_the_end(
            solution, stages, self._host, self.device, progress, tell=tell, session=session
        )
