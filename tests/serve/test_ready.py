"""When a server is ready: every graph has a plan, and with ``warms`` a picture."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from graphrun.serve import plans as plans_module
from graphrun.serve import service as service_module
from graphrun.serve.errors import Refused
from graphrun.serve.line import Cost
from graphrun.serve.planner import PlannedShape

PLANNED = {"kind": "planned", "shape": PlannedShape(Cost(1.0, 1.0), 1, "fits", {})}
UNFIT = {"kind": "unfit", "status": 422, "message": "nothing fits", "code": "does_not_fit"}


def begin(port: Any) -> None:
    """The worker is up, and the planner was asked for the defaults."""
    port.service.queue.ready = True
    port.service.plans.plan_defaults()


def tell(port: Any, *answers: dict[str, Any]) -> None:
    """The planner answers what it was asked, in order."""
    pending = [key for key, future in port.service.plans.shapes.items() if not future.done()]
    for key, answer in zip(pending, answers, strict=True):
        port.service.plans.hear(key=key, **answer)


async def readiness(port: Any) -> tuple[int, Any]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.number}") as client:
        answer = await client.get("/readyz")
        return answer.status_code, answer.json()


@pytest.mark.parametrize("second", [PLANNED, UNFIT])
def test_a_server_is_ready_when_every_graph_has_a_plan(
    port_of: Any, tmp_path: Path, second: dict[str, Any]
) -> None:
    async def ask() -> None:
        graphs = (Path("flux-tiny"), Path("sdxl-tiny"))
        async with port_of(tmp_path, graphs=graphs) as port:
            assert (await readiness(port))[0] == 503, "nothing is planned"
            begin(port)
            reasons = [f"{name} is not planned yet" for name in ("flux-tiny", "sdxl-tiny")]
            assert await readiness(port) == (503, {"ready": False, "reasons": reasons})
            tell(port, PLANNED, second)
            lack = {"ready": False, "reasons": ["sdxl-tiny has no plan"]}
            expected = (200, {"ready": True}) if second is PLANNED else (503, lack)
            assert await readiness(port) == expected

    asyncio.run(ask())


def test_a_planner_that_dies_leaves_the_server_unready_until_the_defaults_are_planned(
    port_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_module, "RESTART_SECONDS", 0.0)
    messages = list[str]()
    planner = SimpleNamespace(
        send=lambda kind, **_: messages.append(kind), process=SimpleNamespace(exitcode=-9)
    )
    monkeypatch.setattr(plans_module, "Child", lambda *_: planner)

    async def ask() -> None:
        async with port_of(tmp_path) as port:
            port.service.plans._planner = planner
            begin(port)
            port.service.plans._planner_died()
            assert (await readiness(port))[0] == 503
            async with asyncio.timeout(300):
                while messages != ["plan", "plan"]:
                    await asyncio.sleep(0)
            assert (await readiness(port))[0] == 503
            tell(port, PLANNED)
            assert (await readiness(port))[0] == 200

    asyncio.run(ask())


@pytest.mark.parametrize(("status", "tries"), [(503, 2), (422, 1)])
def test_a_server_whose_warming_failed_is_not_ready(
    port_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    status: int,
    tries: int,
) -> None:
    """A refusal is final; another failure is tried again."""
    monkeypatch.setattr(service_module, "WARM_SECONDS", 0.0)
    count = 0

    async def ask() -> None:
        async with port_of(tmp_path, warms=True) as port:
            service = port.service
            begin(port)
            tell(port, PLANNED)

            def admit(job: Any, *_: Any, **__: Any) -> Any:
                nonlocal count
                count += 1
                is_failed = count == 1
                job.error = Refused(status, "no such luck", "failed") if is_failed else None
                job.change(state="failed" if is_failed else "done")
                return job

            monkeypatch.setattr(service, "_admit", admit)
            cold = (503, {"ready": False, "reasons": ["flux-tiny has made no picture yet"]})
            assert await readiness(port) == cold
            await service._warm()
            assert await readiness(port) == ((200, {"ready": True}) if status == 503 else cold)

    asyncio.run(ask())
    assert count == tries
    log = capfd.readouterr().err
    assert log.count('warming failed graph=flux-tiny error="no such luck"') == 1
