"""SIGHUP: graphs and LoRAs are read again; what is wrong stays as it was, and says so once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphrun.serve.line import Cost
from graphrun.serve.planner import PlannedShape

GRAPHS = Path(__file__).parents[2] / "graphs"
PLANNED = {"kind": "planned", "shape": PlannedShape(Cost(1.0, 1.0), 1, "fits", {})}
UNFIT = {"kind": "unfit", "status": 422, "message": "nothing\nfits", "code": "does_not_fit"}


async def settle(port: Any) -> None:
    """Wait until the reload has ended or waits for a plan."""
    service = port.service
    while not (service._tasks[-1].done() or pending(port)):
        await asyncio.sleep(0)


def pending(port: Any) -> list[Any]:
    return [key for key, future in port.service.plans.shapes.items() if not future.done()]


def tell(port: Any, answer: dict[str, Any]) -> None:
    """The planner answers everything that it was asked."""
    for key in pending(port):
        port.service.plans.hear(key=key, **answer)


async def reload(port: Any, answer: dict[str, Any] | None = PLANNED) -> None:
    port.service.reload()
    await settle(port)
    if answer is not None:
        tell(port, answer)
        await port.service._tasks[-1]


def run(port_of: Any, tmp_path: Path, act: Callable[[Any, Path], Awaitable[None]]) -> None:
    shutil.copytree(GRAPHS, tmp_path / "graphs")
    file = tmp_path / "graphs" / "flux-tiny.yaml"
    (tmp_path / "loras").mkdir()

    async def ask() -> None:
        options = {"graphs": (file,), "loras": tmp_path / "loras"}
        async with port_of(tmp_path, **options) as port:
            port.service.plans.plan_defaults()
            tell(port, PLANNED)
            await act(port, file)

    asyncio.run(ask())


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def steps(port: Any) -> int:
    count: int = port.service.graphs["flux-tiny"].inputs["steps"].default
    return count


def test_a_changed_graph_serves_new_requests_and_admitted_ones_keep_theirs(
    port_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def act(port: Any, file: Path) -> None:
        service, body = port.service, {"prompt": "a"}
        first_request = service.bodies["flux-tiny"].read(body)
        admitted_job = await service.submit_job(first_request, "")
        change(file, "default: 4,", "default: 3,")
        await reload(port, None)
        assert steps(port) == 4, "until it has a plan"
        tell(port, PLANNED)
        await service._tasks[-1]
        assert steps(port) == 3
        assert not service.plans.lacks, "it is ready all the time"
        assert admitted_job.request.definition.inputs["steps"].default == 4
        assert [entry.item for entry in service.line.entries] == [admitted_job]
        next_request = service.bodies["flux-tiny"].read(body)
        assert (first_request.shape.edition, next_request.shape.edition) == (0, 1)
        await reload(port)
        assert service.bodies["flux-tiny"].edition == 1, "nothing changed"

    run(port_of, tmp_path, act)
    log = capfd.readouterr().err
    assert [line.partition(" ")[2] for line in log.splitlines() if "graphs" in line] == [
        "graphs read changed=flux-tiny loras=0",
        "graphs read loras=0",
    ]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("graphrun: 1", "graphrun: [", "flux-tiny.yaml"),
        ("op: ", "opp: ", "flux-tiny.yaml"),
        ("name: flux-tiny", "name: another", "the graphs are called another now"),
        ("default: 4,", "default: 3,", "nothing"),
    ],
)
def test_a_wrong_file_leaves_the_graphs_as_they_were(
    port_of: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    old: str,
    new: str,
    text: str,
) -> None:
    """The last case: a graph that does not fit."""

    async def act(port: Any, file: Path) -> None:
        previous = port.service.catalog
        change(file, old, new)
        await reload(port, UNFIT)
        assert port.service.catalog is previous
        assert not port.service.plans.lacks

    run(port_of, tmp_path, act)
    lines = [line for line in capfd.readouterr().err.splitlines() if "graphs" in line]
    (refusal,) = [line for line in lines if "graphs refused" in line]
    assert text in refusal


def test_loras_are_listed_again(port_of: Any, tmp_path: Path) -> None:
    header = b'{"transformer.x.lora_A.weight": {}}'

    async def act(port: Any, file: Path) -> None:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port.number}", headers={"Authorization": "Bearer a key"}
        ) as client:

            async def listed() -> tuple[list[str], bool]:
                model = (await client.get("/v1/models/flux-tiny")).json()
                return model["loras"], "'glow'" in str((await client.get("/openapi.json")).json())

            assert await listed() == ([], False)
            lora = tmp_path / "loras" / "glow.safetensors"
            lora.write_bytes(len(header).to_bytes(8, "little") + header)
            await reload(port)
            assert await listed() == (["glow"], True)
            lora.write_bytes(b"broken")
            await reload(port)
            assert await listed() == (["glow"], True)

    run(port_of, tmp_path, act)
