"""The process that holds the weights and runs requests, one at a time. It has a session per graph and share of the budgets.

A request that is cancelled stops when the next call into a component begins. After each step the state of its loop is in a journal,
from which another worker resumes it.
"""

from __future__ import annotations

import io
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from graphrun import api
from graphrun.errors import BrokenPlan, GraphrunError, OutOfMemory, TransferFailed
from graphrun.serve.settings import Settings

PREVIEW_SECONDS = 0.5  # at least, from one preview to the next

Group = tuple[str, float]
"""Name of a graph, and its share of the budgets (`graphrun.serve.shares`)."""


class Cancelled(GraphrunError):
    """The request was cancelled."""


def work_forever(connection: Connection, settings: Settings) -> None:
    """Until ``stop``: answers ``run`` (see `Worker.run`) with ``step`` and then ``done``, ``failed`` or ``cancelled``.

    ``cancel`` (id) may come in between.
    """
    worker = Worker(settings, lambda kind, **content: connection.send((kind, content)))
    connection.send(("ready", {}))
    with ThreadPoolExecutor(1) as runner:
        try:
            while (message := connection.recv())[0] != "stop":
                kind, content = message
                if kind == "run":
                    runner.submit(worker.run, **content)
                else:
                    worker.cancelled.add(content["id"])
        finally:  # the server may have ended
            worker.cancelled.add(None)


class Worker:
    """Runs requests. ``send(kind, **content)`` sends a message. ``cancelled``: ids of requests to stop; None: all."""

    def __init__(self, settings: Settings, send: Callable[..., None]) -> None:
        self._settings, self._send = settings, send
        self._graphs = {graph.name: graph for graph in (api.load(path, trust=settings.trust) for path in settings.graphs)}
        self._sessions: dict[Group, Any] = {}
        self._held_bytes: dict[Group, int] = {}  # by each session on the device, between its runs
        self._began = time.monotonic()
        self.cancelled: set[str | None] = set()
        from graphrun.runtime.devices.open import open_devices

        self._device = open_devices(settings.hardware)

    @property
    def clock_seconds(self) -> float:
        """Seconds since the start, of virtual time on the simulated device."""
        machine = getattr(self._device, "machine", None)
        return float(machine.seconds()) if machine is not None else time.monotonic() - self._began

    def run(self, id: str, group: Group, **asked: Any) -> None:
        """Runs a request (arguments of `_made`) in the session of ``group``, and sends how it ended."""
        try:
            made = self._made(id, group, **asked)
            self._send("done", id=id, clock_seconds=self.clock_seconds, **made)
        except Cancelled:
            self._send("cancelled", id=id, clock_seconds=self.clock_seconds)
        except (OutOfMemory, TransferFailed) as error:
            self._fail(id, 503, error)
        except BrokenPlan as error:
            self._fail(id, 500, error)
        except GraphrunError as error:  # what the pipeline's own code refuses
            self._fail(id, 422, error)
        except BaseException as error:  # noqa: BLE001 (the next request must run)
            traceback.print_exc()
            self._fail(id, 500, error)
        finally:
            self._held_bytes[group] = self._device.allocated_bytes - self._others_bytes(group)
            self.cancelled.discard(id)

    def _fail(self, id: str, status: int, error: BaseException) -> None:
        print(f"graphrun: request {id}: {error}", file=sys.stderr)  # noqa: T201 (the server's log)
        shown = str(error) if isinstance(error, GraphrunError) else "the run failed; the server's log has the reason"
        self._send("failed", id=id, status=status, message=shown, clock_seconds=self.clock_seconds)

    def _made(
        self,
        id: str,
        group: Group,
        graph: str,
        inputs: Mapping[str, Any],
        folder: Path,
        suffix: str,
        preview: bool,
        budgets: Mapping[str, int],
        beside: Collection[Group],
    ) -> dict[str, Any]:
        """Runs ``graph`` within ``budgets``. Sessions of groups other than ``beside`` give up their memory first."""
        from graphrun.report.outputs import made_of, save_outputs

        self._release(group, beside)
        session = self._session(group, inputs, budgets)
        before = session.current
        journal = Keeper(folder, inputs, lambda **content: self._step(id, content), preview)
        trace = session.run(inputs, progress=lambda *_: self._refuse_cancelled(id), journal=journal)
        solution = session.current or session.solution
        about = made_of(graph, inputs, solution.problem.digest, self._settings.version)
        pictures = {name: value for name, value in trace.outputs.items() if self._graphs[graph].kinds()[name] == "image"}
        files = save_outputs(pictures, folder / f"picture{suffix}", made_of=about)
        return {"files": files, **_measured(trace, solution, solution is before, self._others_bytes(group))}

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
            arguments: dict[str, Any] = {**settings.budgets, **budgets, "hardware": settings.hardware, "device": self._device}
            arguments |= {"cache": settings.cache, "reuse": settings.reuse}
            self._sessions[group] = Session(self._graphs[group[0]], inputs=inputs, **arguments)
        return self._sessions[group]

    def _step(self, id: str, content: dict[str, Any]) -> None:
        self._send("step", id=id, clock_seconds=self.clock_seconds, **content)

    def _refuse_cancelled(self, id: str) -> None:
        if not self.cancelled.isdisjoint((id, None)):
            raise Cancelled("cancelled")


class Keeper:
    """A journal of loops (`graphrun.ops.steps.Journal`) in ``folder`` that tells each step, with a preview where that is wanted."""

    def __init__(self, folder: Path, inputs: Mapping[str, Any], tell: Callable[..., None], preview: bool) -> None:
        from graphrun.batch.journal import RequestJournal

        self._journal, self._tell, self._preview = RequestJournal(folder), tell, preview
        self._aspect = float(inputs.get("height") or 1) / float(inputs.get("width") or 1)
        self._shown = 0.0

    def state(self, stage: str) -> Any:
        """The state that a worker saved which ended in the middle of the request."""
        return self._journal.state(stage)

    def wants(self, stage: str, done: int, steps: int) -> bool:
        """Tells the step. A loop resumes with two steps or more (`graphrun.Session.submit`)."""
        self._tell(stage=stage, done=done, steps=steps)
        return done <= steps - 2

    def save(self, stage: str, state: Any) -> None:
        """Saves ``state``, and shows it."""
        self._journal.save(stage, state)
        if self._preview and time.monotonic() - self._shown >= PREVIEW_SECONDS:
            from graphrun.report.preview import preview_of

            self._shown, file = time.monotonic(), io.BytesIO()
            preview_of(state.latents, self._aspect).save(file, format="PNG")
            self._tell(stage=stage, done=state.done, steps=state.steps, preview=file.getvalue())


def _measured(trace: Any, solution: Any, again: bool, others_bytes: int) -> dict[str, Any]:
    """What the run took, in all and by stage, beside what was planned; seconds of the device's clock. Peaks are of the device, with
    ``others_bytes`` of other sessions."""
    simulation, stage_of = solution.simulation, {phase.name: phase.stage for phase in solution.chosen.phases}
    planned = simulation.again if again and simulation.again else simulation.slots
    seconds: dict[str, list[float]] = {}
    for slots, column in ((planned, 0), (trace.slots, 1)):
        for slot in slots:
            if (stage := stage_of.get(slot.phase)) is not None:
                took = slot.seconds if column == 0 else slot.end_seconds - slot.start_seconds
                seconds.setdefault(stage, [0.0, 0.0])[column] += took
    overhead_bytes = solution.problem.overhead_bytes - solution.problem.reserve_bytes
    return {
        "stages": {stage: tuple(pair) for stage, pair in seconds.items()},
        "seconds": (sum(slot.seconds for slot in planned), trace.seconds),
        "peak_bytes": (overhead_bytes + others_bytes + simulation.peak_bytes, overhead_bytes + trace.peak_bytes),
        "plan": solution.plan.digest,
        "notes": trace.notes,
    }
