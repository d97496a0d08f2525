"""The process that holds the weights and runs requests, one at a time. It has a session per graph
and share of the budgets.

A request that is cancelled stops when the next call into a component begins. After each step the
state of its loop is in a journal, from which another worker resumes it.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.errors import BrokenPlan, DeviceLost, GraphrunError, OutOfMemory, TransferFailed
from graphrun.serve.child import leave_signals
from graphrun.serve.log import note
from graphrun.serve.settings import Settings

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.serve.together import Asked

Group = tuple[str, float]
"""Name of a graph, and its share of the budgets (`graphrun.serve.shares`)."""


class Cancelled(GraphrunError):
    """The request was cancelled."""


def work_forever(
    connection: Connection, settings: Settings, kind: type[Worker] | None = None
) -> None:
    """Until ``stop``: a worker of ``kind`` (None: `Worker`) answers ``run`` (see `Worker.run`) with
    ``step`` and then ``done``, ``failed`` or ``cancelled``, and ``run_together`` as
    `Worker.run_together` says.

    ``cancel`` (id) may come in between.
    """
    with contextlib.ExitStack() as at_the_end, ThreadPoolExecutor(1) as runner:
        try:
            worker = runner.submit(
                kind or Worker, settings, lambda kind, **content: connection.send((kind, content))
            ).result()
        except GraphrunError as error:  # the server starts another process after a while
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


class Worker:
    """Runs requests. ``send(kind, **content)`` sends a message. ``cancelled``: ids of requests to
    stop; None: all."""

    def __init__(self, settings: Settings, send: Callable[..., None]) -> None:
        self._settings, self._send = settings, send
        self._graphs = {
            graph.name: graph
            for graph in (api.load(path, trust=settings.trust) for path in settings.graphs)
        }
        self._sessions: dict[Group, Any] = {}
        self._held_bytes: dict[Group, int] = {}  # by each session on the device, between its runs
        self._began = time.monotonic()
        self.cancelled: set[str | None] = set()
        self._open()

    def _open(self) -> None:
        from graphrun.runtime.devices.open import open_devices

        self._device = open_devices(self._settings.hardware)

    def close(self) -> None:
        """Nothing: what the process has ends with it."""

    @property
    def clock_seconds(self) -> float:
        """Seconds since the start; on the simulated device virtual ones, without those that no plan
        has."""
        machine = getattr(self._device, "machine", None)
        if machine is None:
            return time.monotonic() - self._began
        return float(
            machine.seconds()
            - sum(session.unplanned_seconds for session in self._sessions.values())
        )

    def run(
        self,
        id: str,
        group: Group,
        graph: str,
        budgets: Mapping[str, int],
        beside: Collection[Group],
        **asked: Any,
    ) -> None:
        """Runs a request (``asked``: further fields of `Asked`) in the session of ``group``, and
        sends how it ended."""
        from graphrun.serve.together import Asked

        try:
            made = self._made(Asked(id, 0, **asked), group, self._graphs[graph], budgets, beside)
            self._tell("done", id=id, **made)
        except Cancelled:
            self._tell("cancelled", id=id)
        except (OutOfMemory, TransferFailed, DeviceLost) as error:
            self._fail(id, 503, error)
        except BrokenPlan as error:
            self._fail(id, 500, error)
        except GraphrunError as error:  # what the pipeline's own code refuses
            self._fail(id, 422, error)
        except BaseException as error:  # noqa: BLE001 (the next request must run)
            traceback.print_exc()
            self._fail(id, 500, error)
        finally:
            self._ended(group, [id])

    def _fail(self, id: str, status: int, error: BaseException) -> None:
        note(f"request {id}: {error}")
        shown = (
            str(error)
            if isinstance(error, GraphrunError)
            else "the run failed; the server's log has the reason"
        )
        self._tell("failed", id=id, status=status, message=shown)

    def _made(
        self,
        asked: Asked,
        group: Group,
        graph: Graph,
        budgets: Mapping[str, int],
        beside: Collection[Group],
    ) -> dict[str, Any]:
        """Runs ``asked`` within ``budgets``. Sessions of groups other than ``beside`` give up their
        memory first."""
        from graphrun.serve.together import Keeper, Measured, saved

        self._release(group, beside)
        session, measured = self._session(group, asked.inputs, budgets), Measured()
        before = session.current
        journal = Keeper(asked, lambda **content: self._tell("step", id=asked.id, **content))
        trace = session.run(
            asked.inputs, progress=lambda *_: self._refuse_cancelled(asked.id), journal=journal
        )
        solution = session.current or session.solution
        measured.add(trace, solution, solution is before, self._others_bytes(group))
        return saved(
            asked, trace.outputs, graph, self._settings.version, measured, solution.problem.digest
        )

    def run_together(
        self,
        runs: list[dict[str, Any]],
        group: Group,
        graph: str,
        segments: tuple[tuple[str, ...], ...],
        budgets: Mapping[str, int],
        beside: Collection[Group],
    ) -> None:
        """Runs requests of one shape stage by stage (`graphrun.serve.together`), and sends
        ``together`` when that has ended."""
        from graphrun.serve.together import Asked

        try:
            self._run_together(
                [Asked(**of) for of in runs], group, self._graphs[graph], segments, budgets, beside
            )
        except GraphrunError as error:  # each runs by itself then, and is told its own reason
            note(f"{len(runs)} runs together: {error}")
        except BaseException:  # noqa: BLE001 (the next request must run)
            traceback.print_exc()
        finally:
            self._ended(group, [of["id"] for of in runs])
            self._tell("together", id=runs[0]["id"])

    def _run_together(
        self,
        every: Sequence[Asked],
        group: Group,
        graph: Graph,
        segments: tuple[tuple[str, ...], ...],
        budgets: Mapping[str, int],
        beside: Collection[Group],
    ) -> None:
        from graphrun.serve.together import run_together

        self._release(group, beside)
        inputs = every[0].inputs
        with self._session(group, inputs, budgets).lend(inputs) as host:
            run_together(
                every,
                graph,
                segments,
                self._arguments(budgets),
                host,
                self._settings.reuse,
                self._tell,
                self._is_cancelled,
                self._settings.version,
                self._others_bytes(group),
            )

    def _ended(self, group: Group, ids: Collection[str]) -> None:
        self._held_bytes[group] = self._device.allocated_bytes - self._others_bytes(group)
        self.cancelled.difference_update(ids)

    def _is_cancelled(self, id: str) -> bool:
        return not self.cancelled.isdisjoint((id, None))

    def _others_bytes(self, group: Group) -> int:
        return sum(nbytes for other, nbytes in self._held_bytes.items() if other != group)

    def _release(self, group: Group, beside: Collection[Group]) -> None:
        for other, session in self._sessions.items():
            if other != group and other not in beside:
                session.release()
                self._held_bytes.pop(other, None)

    def _session(self, group: Group, inputs: Mapping[str, Any], budgets: Mapping[str, int]) -> Any:
        from graphrun.session import Session

        if group not in self._sessions:
            settings = self._settings
            arguments = self._arguments(budgets)
            self._sessions[group] = Session(
                self._graphs[group[0]], inputs=inputs, reuse=settings.reuse, **arguments
            )
        return self._sessions[group]

    def _arguments(self, budgets: Mapping[str, int]) -> dict[str, Any]:
        settings = self._settings
        own = {"hardware": settings.hardware, "device": self._device, "cache": settings.cache}
        return {**settings.budgets, **budgets, **own}

    def _tell(self, kind: str, **content: Any) -> None:
        self._send(kind, clock_seconds=self.clock_seconds, **content)

    def _refuse_cancelled(self, id: str) -> None:
        if self._is_cancelled(id):
            raise Cancelled("cancelled")
