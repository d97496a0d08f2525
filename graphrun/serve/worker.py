"""The process that loads the weights and runs requests, one at a time.

It has one session per graph and share of the budgets. A cancelled request stops at the next call
into a component. After each step, a journal stores the state of the loop; another worker can resume
from there.
"""

from __future__ import annotations

import contextlib
import errno
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from graphrun.errors import BrokenPlan, DeviceLost, GraphrunError, OutOfMemory, TransferFailed
from graphrun.graph.loras import without_paths
from graphrun.serve.catalog import GraphVariant, Variants
from graphrun.serve.child import leave_signals
from graphrun.serve.log import note
from graphrun.serve.settings import Settings

if TYPE_CHECKING:
    from graphrun.serve.together import RunRequest

GraphShare = tuple[str, float]
"""A graph's name, and its share of the budgets (`graphrun.serve.shares`)."""


FULL = (errno.ENOSPC, errno.EDQUOT)  # no room, or no more for this user


@dataclass(frozen=True, slots=True)
class SessionBudget:
    """The session of a run. ``variant``: its graph. ``budgets``: of its share; empty: the whole
    budgets. ``resident_groups``: sessions that keep their memory meanwhile; the others release
    it."""

    group: GraphShare
    variant: GraphVariant
    budgets: Mapping[str, int]
    resident_groups: Collection[GraphShare]


def _is_full_disk(error: BaseException | None) -> bool:
    """Whether ``error``, or an error that caused it, is of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__
    return False


class Cancelled(GraphrunError):
    """The request was cancelled."""


def work_forever(
    connection: Connection, settings: Settings, kind: type[RequestWorker] | None = None
) -> None:
    """Run requests until ``stop``, with a worker of class ``kind`` (None: the default).

    ``run`` is answered with ``step`` messages and then ``done``, ``failed`` or ``cancelled``;
    ``run_together`` as its method describes. ``cancel`` (id) may arrive at any time.
    """
    with contextlib.ExitStack() as at_the_end, ThreadPoolExecutor(1) as runner:
        try:
            worker = runner.submit(
                kind or RequestWorker,
                settings,
                lambda kind, **content: connection.send((kind, content)),
            ).result()
        except GraphrunError as error:  # the server restarts the process later
            note(str(error))
            return
        at_the_end.callback(worker.close)
        leave_signals()
        connection.send(("ready", {}))
        try:
            while (message := connection.recv())[0] != "stop":
                kind, content = message
                if kind in ("run", "run_together"):
                    runner.submit(getattr(worker, kind), **content)
                else:
                    worker.cancelled.add(content["id"])
        finally:  # the server may have ended
            worker.cancelled.add(None)


class RequestWorker:
    """Runs requests. ``send(kind, **content)`` sends a message to the server. ``cancelled``: ids of
    requests to stop; None in it stops all."""

    def __init__(self, settings: Settings, send: Callable[..., None]) -> None:
        self._settings, self._send = settings, send
        self._variants = Variants()
        self._sessions: dict[GraphShare, Any] = {}
        self._weights: dict[GraphShare, tuple[object, ...]] = {}  # of the sessions
        self._held_bytes: dict[GraphShare, int] = {}  # of idle sessions
        self._began = time.monotonic()
        self.cancelled: set[str | None] = set()
        self._open()

    def _open(self) -> None:
        from graphrun.runtime.devices.open import open_devices

        self._device = open_devices(self._settings.hardware)

    def close(self) -> None:
        """No-op: the OS frees everything when the process exits."""

    @property
    def clock_seconds(self) -> float:
        """Seconds since the start; on the simulated device virtual, and only those that plans
        count."""
        machine = getattr(self._device, "machine", None)
        if machine is None:
            return time.monotonic() - self._began
        return float(
            machine.seconds()
            - sum(session.unplanned_seconds for session in self._sessions.values())
        )

    def run(self, run: Mapping[str, Any], budget: SessionBudget) -> None:
        """Run a request, and send how it ended. ``run``: the fields of its `RunRequest`."""
        from graphrun.serve.together import RunRequest

        id = run["id"]
        try:
            self._notify("done", id=id, **self._execute(RunRequest(**run), budget))
        except Cancelled:
            self._notify("cancelled", id=id)
        except (OutOfMemory, TransferFailed, DeviceLost) as error:
            self._fail(id, 503, error)
        except BrokenPlan as error:
            self._fail(id, 500, error)
        except GraphrunError as error:  # the pipeline's own code refuses the inputs
            if _is_full_disk(error):
                note(f"request {id}: {error}")
                self._fail(id, 503, GraphrunError("the disk of the server is full: try again"))
                return
            text = without_paths(str(error), budget.variant.loras)
            self._fail(id, 422, GraphrunError(text))
        except BaseException as error:  # noqa: BLE001 (the next request must run)
            traceback.print_exc()
            self._fail(id, 500, error)
        finally:
            self._end_run(budget.group, [id])

    def _fail(self, id: str, status: int, error: BaseException) -> None:
        note(f"request {id}: {error}")
        message = (
            str(error)
            if isinstance(error, GraphrunError)
            else "the run failed; the server's log has the reason"
        )
        self._notify("failed", id=id, status=status, message=message)

    def _execute(self, run: RunRequest, budget: SessionBudget) -> dict[str, Any]:
        from graphrun.serve.together import Keeper, RunFigures, save_pictures

        session, figures = self._session(budget, run.inputs), RunFigures()
        previous = session.current
        journal = Keeper(run, lambda **content: self._notify("step", id=run.id, **content))
        trace = session.run(
            run.inputs, progress=lambda *_: self._refuse_cancelled(run.id), journal=journal
        )
        solution = session.current or session.solution
        figures.add(trace, solution, solution is previous, self._others_bytes(budget.group))
        graph = self._variants.graph_of(budget.variant)
        return save_pictures(
            run, trace.outputs, graph, self._settings.version, figures, solution.problem.digest
        )

    def run_together(
        self,
        runs: list[dict[str, Any]],
        budget: SessionBudget,
        segments: tuple[tuple[str, ...], ...],
    ) -> None:
        """Run requests of one shape as a batch (`graphrun.serve.together`); end with
        ``together``."""
        from graphrun.serve.together import RunRequest

        try:
            self._run_together([RunRequest(**fields) for fields in runs], budget, segments)
        except GraphrunError as error:  # each run then runs by itself and reports its own error
            note(f"{len(runs)} runs together: {error}")
        except BaseException:  # noqa: BLE001 (the next request must run)
            traceback.print_exc()
        finally:
            self._end_run(budget.group, [fields["id"] for fields in runs])
            self._notify("together", id=runs[0]["id"])

    def _run_together(
        self,
        runs: Sequence[RunRequest],
        budget: SessionBudget,
        segments: tuple[tuple[str, ...], ...],
    ) -> None:
        from graphrun.serve.together import run_together

        inputs = runs[0].inputs
        with self._session(budget, inputs).lend(inputs) as host:
            run_together(
                runs,
                self._variants.graph_of(budget.variant),
                segments,
                self._arguments(budget),
                host,
                self._settings.reuse,
                self._notify,
                self._is_cancelled,
                self._settings.version,
                self._others_bytes(budget.group),
            )

    def _end_run(self, group: GraphShare, ids: Collection[str]) -> None:
        self._held_bytes[group] = self._device.allocated_bytes - self._others_bytes(group)
        self.cancelled.difference_update(ids)

    def _is_cancelled(self, id: str) -> bool:
        return not self.cancelled.isdisjoint((id, None))

    def _others_bytes(self, group: GraphShare) -> int:
        return sum(nbytes for other, nbytes in self._held_bytes.items() if other != group)

    def _session(self, budget: SessionBudget, inputs: Mapping[str, Any]) -> Any:
        """Return the session of ``budget``, after sessions that may not stay have released their
        memory, and sessions of the graph with other weights are closed."""
        from graphrun.session import Session

        group, weights = budget.group, budget.variant.weights
        for other in [*self._sessions]:
            if other[0] == group[0] and self._weights[other] != weights:
                self._sessions.pop(other).close()
                self._held_bytes.pop(other, None)
        for other, session in self._sessions.items():
            if other != group and other not in budget.resident_groups:
                session.release()
                self._held_bytes.pop(other, None)
        if group not in self._sessions:
            graph, reuse = self._variants.graph_of(budget.variant), self._settings.reuse
            arguments = self._arguments(budget)
            self._weights[group] = weights
            self._sessions[group] = Session(graph, inputs=inputs, reuse=reuse, **arguments)
        return self._sessions[group]

    def _arguments(self, budget: SessionBudget) -> dict[str, Any]:
        variant = budget.variant
        settings = variant.settings_of(self._settings, self._variants.graph_of(variant))
        return {
            **settings.budgets,
            **budget.budgets,
            "hardware": settings.hardware,
            "device": self._device,
            "cache": settings.cache,
        }

    def _notify(self, kind: str, **content: Any) -> None:
        self._send(kind, clock_seconds=self.clock_seconds, **content)

    def _refuse_cancelled(self, id: str) -> None:
        if self._is_cancelled(id):
            raise Cancelled("cancelled")
