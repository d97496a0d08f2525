"""LoRAs that requests name: from the operator's folder only, planned and fused as those of a graph
file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import graphrun
from graphrun.errors import InputError
from graphrun.graph.loras import LoraFile, known_permissions, lora_files, with_loras
from graphrun.graph.parts import Adapter, Checkpoint
from graphrun.profile.hardware import hardware
from graphrun.serve import planner
from graphrun.serve.bodies import body_model
from graphrun.serve.catalog import Catalog, GraphVariant
from graphrun.serve.errors import Refused
from graphrun.serve.line import Cost
from graphrun.serve.planner import PlannedShape
from graphrun.serve.settings import Bounds, Settings
from graphrun.serve.state import JobStore
from graphrun.serve.worker import RequestWorker, SessionBudget

SMALL = {"height": 32, "width": 32, "steps": 3, "max_sequence_length": 16}
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def flux() -> Any:
    return graphrun.load("flux-tiny")


def write(file: Path, key: str, *, size: int | None = None, factor: float = 0.5) -> None:
    """Write a LoRA for the layer ``key`` of the small FLUX; ``size``: of another model."""
    width = size or 128
    generator = torch.Generator().manual_seed(5)
    save_file(
        {
            f"{key}.lora_A.weight": factor * torch.randn(2, width, generator=generator),
            f"{key}.lora_B.weight": torch.randn(width, 2, generator=generator),
        },
        file,
    )


@pytest.fixture
def folder(tmp_path: Path, flux: Any) -> Path:
    """A folder of LoRAs: two for the small FLUX, one for a UNet."""
    (folder := tmp_path / "loras").mkdir()
    write(folder / "style.safetensors", f"transformer.{LAYER}")
    write(folder / "bare.safetensors", LAYER)
    write(folder / "other.safetensors", "unet.mid_block.attentions.0.to_q")
    write(folder / "wide.safetensors", f"transformer.{LAYER}", size=32)
    (folder / "notes.txt").write_text("not a LoRA")
    return folder


def model_of(graph: Any, folder: Path) -> Any:
    return body_model(graph, Bounds(), lora_files(folder))


def test_a_request_names_loras_that_change_its_graph(flux: Any, folder: Path) -> None:
    model = model_of(flux, folder)
    assert [*model.available_loras] == ["bare", "style", "wide"]
    shape = model.read({"prompt": "a", "loras": ["style", {"name": "bare", "scale": 0.5}]}).shape
    assert [(use.name, use.scale, use.components) for use in shape.loras] == [
        ("style", 1.0, ("transformer",)),
        ("bare", 0.5, ("transformer",)),
    ]
    assert shape != model.read({"prompt": "a", "loras": "style"}).shape
    for text in ("style", '["style"]', '[{"name": "style"}]'):
        request = model.read({"prompt": "a", "loras": text})
        assert [use.name for use in request.shape.loras] == ["style"], text
    assert model.read({"prompt": "a", "loras": None}).shape.loras == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("nothing", "flux-tiny has no LoRA 'nothing'; it has bare, style, wide"),
        ("other", "flux-tiny has no LoRA 'other'; it has bare, style, wide"),
        ("../loras/style", "has no LoRA '../loras/style'"),
        ("style.safetensors", "has no LoRA 'style.safetensors'"),
        ("", "has no LoRA ''"),
        (["style", "style"], "a LoRA is named twice"),
        (["style"] * 5, "5 LoRAs, and a request may have 4"),
        ([{"name": "style", "scale": 9}], "with a scale from -4 to 4"),
        ([{"name": "style", "file": "/etc/passwd"}], "is neither a name nor"),
        ([{"name": "style", "scale": float("nan")}], "is neither a name nor"),
        (7, "7 is neither a name nor"),
        (Path("upload-0"), "a file is neither a name nor"),
        ([[]] * 4, "is neither a name nor"),
    ],
)
def test_what_is_no_name_in_the_folder_is_refused(
    flux: Any, folder: Path, value: Any, text: str
) -> None:
    with pytest.raises(Refused) as refusal:
        model_of(flux, folder).read({"prompt": "a", "loras": value})
    assert (refusal.value.status, refusal.value.param) == (422, "loras")
    assert text in refusal.value.message
    assert str(folder) not in refusal.value.message, "paths are the operator's"


def test_an_absolute_path_is_only_an_unknown_name(flux: Any, folder: Path) -> None:
    with pytest.raises(Refused, match="has no LoRA"):
        model_of(flux, folder).read({"prompt": "a", "loras": str(folder / "style.safetensors")})


def test_a_server_without_loras_refuses_the_field(flux: Any) -> None:
    with pytest.raises(Refused, match="has no input 'loras'"):
        body_model(flux, Bounds()).read({"prompt": "a", "loras": ["style"]})


def test_the_schema_lists_the_loras(flux: Any, folder: Path) -> None:
    text = str(model_of(flux, folder).model_json_schema())
    assert "['bare', 'style', 'wide']" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is no safetensors file"),
        (b"\xff" * 64, "is no safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "is no LoRA in the layout of diffusers"),
        (b'\x0d\0\0\0\0\0\0\0{"alpha": {}}', "it has alpha"),
    ],
)
def test_a_file_that_is_no_lora_is_refused_at_the_start(
    folder: Path, content: bytes, text: str
) -> None:
    (folder / "bad.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=text) as error:
        lora_files(folder)
    assert "bad.safetensors" in str(error.value)
    with pytest.raises(InputError, match="--loras .*: No such file"):
        lora_files(folder / "absent")


def test_a_graph_with_loras_plans_as_one_whose_file_has_them(flux: Any, folder: Path) -> None:
    """Published checkpoints that are already quantized cannot have a LoRA."""
    component = replace(
        flux.component("transformer"),
        checkpoints=(Checkpoint("Q4_0", "owner/name/x.gguf"),),
        precision=("float32", "nf4", "fp8", "Q4_0"),
    )
    graph = replace(flux, components={**flux.components, "transformer": component})
    uses = model_of(graph, folder).read({"prompt": "a", "loras": ["style"]}).shape.loras
    variant = with_loras(graph, uses)
    component_with_lora = variant.component("transformer")
    assert component_with_lora.loras == (
        Adapter(str((folder / "style.safetensors").resolve()), 1.0),
    )
    assert (component_with_lora.checkpoints, component_with_lora.precision) == (
        (),
        ("float32", "nf4"),
    )
    assert known_permissions(variant, ["nf4,Q4_0", "fp8", "4bit"]) == ("nf4", "4bit")
    quantized = replace(component, precision=("Q4_0",))
    only_gguf = replace(flux, components={**flux.components, "transformer": quantized})
    file = LoraFile.read(folder / "style.safetensors")
    assert file.components_in(only_gguf) == ()


def settings_for(folder: Path, budgets: Mapping[str, int]) -> Settings:
    place = folder.parent
    options = (place / "cache", "none", place, {}, "1")
    return Settings((Path("flux-tiny"),), (), budgets, (hardware("sim"),), *options, loras=folder)


def shape_with(settings: Settings, *loras: Any) -> Any:
    body = Catalog.read(settings).bodies["flux-tiny"]
    return body.read({**SMALL, "prompt": "a", "seed": 1, "loras": list(loras)})


class Messages:
    """The planner's end of a connection: gives ``requests``, then stops; takes answers."""

    def __init__(self, *requests: dict[str, Any]) -> None:
        self._requests = [*(("plan", request) for request in requests), ("stop", {})]
        self.answers = list[tuple[str, dict[str, Any]]]()

    def recv(self) -> tuple[str, dict[str, Any]]:
        return self._requests.pop(0)

    def poll(self) -> bool:
        return len(self._requests) > 1

    def send(self, message: tuple[str, dict[str, Any]]) -> None:
        self.answers.append(message)


def test_a_planner_without_a_message_imports_what_a_new_size_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, after its answers: the first new size does not wait for these imports."""
    settings = settings_for(folder, {"vram": 6 * 2**20, "ram": 2**33})
    variant = GraphVariant.of(shape_with(settings))
    connection: Any = Messages(
        *({"key": n, "variant": variant, "inputs": {}, "share": 1.0} for n in range(3))
    )
    imports = list[tuple[str, int]]()
    monkeypatch.setattr(
        planner,
        "import_code",
        lambda graph: imports.append((graph.name, len(connection.answers))),
    )
    shape = PlannedShape(Cost(1.0, 1.0), 1, "fits", {})
    monkeypatch.setattr(planner, "_plan_shape", lambda *_: shape)
    planner.plan_forever(connection, settings)
    assert imports == [("flux-tiny", 3)]


@pytest.mark.long
def test_pictures_have_the_loras_that_were_named(folder: Path, tmp_path: Path) -> None:
    """As of a graph whose file has the LoRA; without one, the pictures are as before."""
    settings = settings_for(folder, {"vram": 6 * 2**20, "ram": 2**33})
    requests = [shape_with(settings, *loras) for loras in ((), ("style",), (), ("wide",))]
    plan_requests = [
        {
            "key": number,
            "variant": GraphVariant.of(request),
            "inputs": {name: request.runs[0][name] for name, _ in request.shape.settings},
            "share": 1.0,
        }
        for number, request in enumerate(requests)
    ]
    connection: Any = Messages(*plan_requests)
    planner.plan_forever(connection, settings)
    kinds = [kind for kind, _ in connection.answers]
    assert kinds == ["planned", "planned", "planned", "unfit"]
    refusal = connection.answers[3][1]
    assert (refusal["status"], str(folder) in refusal["message"]) == (422, False)
    assert "the LoRA wide does not fit: components.transformer.loras: wide" in refusal["message"]

    messages = list[tuple[str, dict[str, Any]]]()
    worker = RequestWorker(settings, lambda kind, **content: messages.append((kind, content)))

    def picture(number: int, variant: GraphVariant) -> Any:
        (place := tmp_path / str(number)).mkdir()
        request = requests[number % 3]
        fields = {
            "id": str(number),
            "number": 0,
            "inputs": request.runs[0],
            "folder": place,
            "suffix": ".png",
            "preview": False,
            "loras": tuple((use.name, use.scale) for use in variant.loras),
        }
        worker.run(fields, SessionBudget(("flux-tiny", 1.0), variant, {}, frozenset()))
        assert messages[-1][0] == "done", messages[-1]
        return Image.open(messages[-1][1]["files"][0])

    pictures = [picture(number, GraphVariant.of(requests[number])) for number in range(3)]
    assert pictures[0].tobytes() == pictures[2].tobytes() != pictures[1].tobytes()
    assert '"loras": {"style": 1.0}' in pictures[1].info["graphrun"]
    graph = with_loras(requests[0].definition, requests[1].shape.loras)
    assert picture(3, GraphVariant(graph, 1)).tobytes() == pictures[1].tobytes(), (
        "of a file with it"
    )
    (folder / "style.safetensors").write_bytes(b"broken")
    stale_variant = GraphVariant(requests[0].definition, 2, requests[1].shape.loras)
    with pytest.raises(AssertionError, match="failed") as error:
        picture(4, stale_variant)
    assert "'status': 422" in str(error.value)
    assert str(folder) not in messages[-1][1]["message"]


def test_a_stored_job_keeps_its_loras_or_fails_without_them(
    folder: Path, tmp_path: Path, flux: Any
) -> None:
    settings = settings_for(folder, {})
    catalog = Catalog.read(settings)
    store = JobStore(tmp_path / "state")
    request = shape_with(settings, {"name": "style", "scale": 0.5})
    job = SimpleNamespace(
        id="1", owner="", created=1, key="", body="", request=request, state="waiting"
    )
    store.add(job)  # type: ignore[arg-type]
    (waiting_job,) = store.jobs(catalog)
    assert (waiting_job.state, waiting_job.request.shape) == ("waiting", request.shape)
    (folder / "style.safetensors").unlink()
    (failed_job,) = store.jobs(Catalog.read(settings))
    assert failed_job.state == "failed"
    assert failed_job.error is not None
    assert "has no LoRA 'style'; it has bare, wide" in failed_job.error.message
    store.close()
