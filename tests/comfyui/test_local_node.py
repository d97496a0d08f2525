"""The node in ComfyUI's process: graphrun's own pictures, and memory that ComfyUI knows of."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy_standin
import numpy as np
import pytest
import torch
from comfy_standin import MIB
from PIL import Image

import graphrun
from graphrun import device_kinds
from graphrun.comfyui import engine
from graphrun.comfyui.engine import (
    DoesNotFit,
    LocalRequest,
    allocator_backend,
    allocator_note,
    budgets_for,
    inputs_for,
)
from graphrun.comfyui.nodes import LocalNode
from graphrun.errors import GraphError, InputError
from graphrun.profile.hardware import data_sheet_estimates
from graphrun.profile.processor import cpu_estimate

BUDGET = "64M"
VALUES = {**comfy_standin.VALUES, "device": "sim", "budget": BUDGET, "ram": "8G"}


def draw(node: LocalNode, graph: str, **values: Any) -> tuple[Any, str]:
    """As ComfyUI calls nodes: in inference mode."""
    with torch.inference_mode():
        image, text = node.draw(graph, **{**VALUES, **values})
    return image, text


@contextmanager
def free_memory_of_sim() -> Iterator[None]:
    """Let the simulated device have free memory, as a card does: ComfyUI's figure."""
    kind = device_kinds.kind_called("sim")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device_kinds._BUILT_IN, "sim", replace(kind, free_memory="driver"))
        device_kinds.kind_called.cache_clear()
        yield
    device_kinds.kind_called.cache_clear()


def pixels(picture: Any) -> Any:
    return np.asarray(picture.convert("RGB"), dtype=np.float32) / 255


def expected(name: str, **inputs: Any) -> Any:
    """The picture of graphrun's own commands."""
    graph = graphrun.load(name)
    problem = graphrun.estimate(graph, vram=BUDGET, ram="8G", hardware="sim", inputs=inputs)
    trace = graphrun.run(graphrun.plan(problem), graph, inputs)
    return pixels(trace.outputs["image"])


@pytest.mark.long
def test_the_picture_is_graphruns_own(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, small_flux: str
) -> None:
    image, text = draw(node, small_flux)
    assert (image.dtype, image.shape) == (torch.float32, (1, 32, 32, 3))
    assert np.array_equal(image[0].numpy(), expected(small_flux, prompt="a boat", seed=7))
    assert text.startswith("fits: yes. ")
    assert text.endswith("the run stayed within the planned memory")
    assert "denoise" in text
    assert " -v " not in text
    values = [value for value, total, _ in comfy_ui.updates if total == 100]
    assert values == sorted(values)
    assert values[-1] == 100
    previews = [preview for _, _, preview in comfy_ui.updates if preview is not None]
    assert previews
    assert all(
        kind == "JPEG" and isinstance(picture, Image.Image) and side == 512
        for kind, picture, side in previews
    )


@pytest.mark.sweep("more")
@pytest.mark.long
def test_other_sizes_and_texts_are_runs_of_one_session(node: LocalNode, small_flux: str) -> None:
    first, _ = draw(node, small_flux)
    patcher = node.engine.patcher
    wide, _ = draw(node, small_flux, width=48, steps=2)
    other, _ = draw(node, small_flux, prompt="a castle", inputs="guidance_scale=2")
    assert wide.shape == (1, 32, 48, 3)
    sizes = {"prompt": "a boat", "seed": 7, "width": 48, "steps": 2}
    assert np.array_equal(wide[0].numpy(), expected(small_flux, **sizes))
    settings = {"prompt": "a castle", "seed": 7, "guidance_scale": 2.0}
    assert np.array_equal(other[0].numpy(), expected(small_flux, **settings))
    repeated_image, _ = draw(node, small_flux)
    assert torch.equal(first, repeated_image)
    assert node.engine.patcher is patcher


@pytest.mark.long
def test_progress_is_of_the_plan_without_cached_stages(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, small_flux: str
) -> None:
    draw(node, small_flux)
    node.engine.close()
    comfy_ui.updates.clear()
    _, text = draw(node, small_flux)
    assert "text_encoder" not in text
    assert max(value for value, total, _ in comfy_ui.updates if total == 100) == 100


@pytest.mark.sweep("more")
@pytest.mark.long
def test_comfyui_and_graphrun_hand_the_memory_to_each_other(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, small_flux: str
) -> None:
    comfy_model = comfy_ui.model(63 * MIB)
    assert comfy_ui.free() == MIB
    first, _ = draw(node, small_flux)
    patcher, session = node.engine.patcher, node.engine.session
    assert session is not None
    assert patcher.load_device == comfy_standin.CARD, "a simulated device stands for ComfyUI's"
    held_bytes = patcher.loaded_size()
    assert held_bytes == session.held_bytes == session.device.allocated_bytes > 0
    assert patcher.model_size() >= held_bytes
    assert patcher.current_loaded_device() == comfy_standin.CARD
    simulation = session.solution.simulation
    assert comfy_model.loaded_size() < 63 * MIB, "ComfyUI's model made room"
    assert comfy_ui.card_bytes - comfy_model.loaded_size() >= simulation.peak_bytes, (
        "for the whole peak, not for the weights alone"
    )
    assert comfy_ui.requests[-1] + patcher.size == simulation.peak_bytes + (
        session.solution.problem.hardware.workspace_bytes
    )

    comfy_ui.load([comfy_model])  # needs what graphrun has
    assert patcher.loaded_size() == session.held_bytes == session.device.allocated_bytes == 0
    assert patcher.current_loaded_device() == torch.device("cpu")
    assert comfy_model.loaded_size() == 63 * MIB

    repeated_image, text = draw(node, small_flux)
    assert torch.equal(first, repeated_image)
    assert text.endswith("the run stayed within the planned memory")


@pytest.mark.long
def test_unload_frees_everything_and_a_renewed_entry_nothing(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, small_flux: str
) -> None:
    draw(node, small_flux)
    patcher, session = node.engine.patcher, node.engine.session
    assert session is not None
    held_bytes = patcher.loaded_size()
    comfy_ui.load([patcher])
    assert patcher.loaded_size() == held_bytes > 0, "the next run finds its weights"
    assert comfy_ui.patchers == [patcher]
    warm_moved = session.run({"seed": 1}).moved_bytes
    assert patcher.partially_unload(torch.device("cpu"), 1) == held_bytes
    assert session.device.allocated_bytes == 0
    assert session.run({"seed": 1}).moved_bytes > warm_moved
    comfy_ui.unload_all()
    assert session.device.allocated_bytes == patcher.loaded_size() == 0
    assert comfy_ui.patchers == []


@pytest.mark.sweep("more")
@pytest.mark.long
def test_tensors_of_comfyui_are_outside_of_the_budget(node: LocalNode, small_flux: str) -> None:
    draw(node, small_flux)
    session = node.engine.session
    assert session is not None
    with session.device.machine:  # type: ignore[attr-defined]
        comfy_tensor = torch.empty(80 * MIB, dtype=torch.uint8, device=session.device.torch_device)
    image, text = draw(node, small_flux, prompt="a castle")
    assert text.endswith("the run stayed within the planned memory")
    assert np.array_equal(image[0].numpy(), expected(small_flux, prompt="a castle", seed=7))
    del comfy_tensor


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_refusal_says_what_to_type(node: LocalNode, small_flux: str) -> None:
    with pytest.raises(DoesNotFit) as refusal:
        draw(node, small_flux, budget="200K")
    message = str(refusal.value)
    assert message.startswith("flux-tiny on sim: nothing fits: ")
    assert "--vram" not in message
    assert "vram=" not in message
    budget = re.search(r"What helps: (?:.*; )?budget (\S+) \(", message)
    assert budget, message
    image, _ = draw(node, small_flux, budget=budget[1])
    assert np.array_equal(image[0].numpy(), expected(small_flux, prompt="a boat", seed=7))


@pytest.mark.sweep("more")
@pytest.mark.long
def test_an_empty_budget_that_is_too_small_is_refused(
    node: LocalNode,
    comfy_ui: comfy_standin.ComfyUI,
    small_flux: str,
) -> None:
    with pytest.raises(InputError, match="sim has no memory of its own; type a size, such as 8G"):
        draw(node, small_flux, budget="")
    comfy_ui.card_bytes = 160 * 2**10
    with free_memory_of_sim(), pytest.raises(DoesNotFit) as refusal:
        draw(node, small_flux, budget="")
    message = str(refusal.value)
    assert message.startswith("flux-tiny on sim: nothing fits: ")
    assert "152" in message, "95 % of what ComfyUI can free"
    assert comfy_ui.patchers == []
    comfy_ui.card_bytes = 64 * MIB
    with free_memory_of_sim():
        image, _ = draw(node, small_flux, budget="")
    assert np.array_equal(image[0].numpy(), expected(small_flux, prompt="a boat", seed=7))


@pytest.mark.long
def test_cancelling_stops_the_run_and_empties_the_device(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, small_flux: str
) -> None:
    comfy_ui.interrupt_after = 3
    with pytest.raises(comfy_standin.Interrupted):
        draw(node, small_flux, steps=40)
    session = node.engine.session
    assert session is not None
    assert session.device.allocated_bytes == node.engine.patcher.loaded_size() == 0
    assert len(comfy_ui.updates) < 40
    image, _ = draw(node, small_flux)
    assert np.array_equal(image[0].numpy(), expected(small_flux, prompt="a boat", seed=7))


@pytest.mark.sweep("more")
@pytest.mark.long
def test_another_graph_takes_the_place_of_the_first(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, small_flux: str
) -> None:
    draw(node, small_flux)
    session = node.engine.session
    assert session is not None
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    result, _ = draw(node, "sdxl-img2img-tiny", image=image, steps=2)
    assert session.held_bytes == 0
    assert len(comfy_ui.patchers) <= 2
    picture = Image.fromarray((image[0].numpy() * 255).round().astype(np.uint8))
    inputs = {"prompt": "a boat", "seed": 7, "steps": 2, "image": picture}
    assert np.array_equal(result[0].numpy(), expected("sdxl-img2img-tiny", **inputs))


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_folder_of_diffusers_is_imported_once(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        from tiny_flux import tiny_flux
    finally:
        sys.path.pop(0)
    pipe = tiny_flux()
    pipe.save_pretrained(tmp_path / "a pipeline")
    values = {"width": 32, "height": 32, "steps": 2}
    image, _ = draw(node, str(tmp_path / "a pipeline"), **values)
    node.engine.close()
    monkeypatch.setattr("graphrun.diffusers_.importing.imported.import_source", None)
    repeated_image, _ = draw(node, str(tmp_path / "a pipeline"), **values)
    assert torch.equal(image, repeated_image)
    plain = pipe(
        "a boat",
        width=32,
        height=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert np.array_equal(image[0].numpy(), pixels(plain))


@pytest.mark.long
def test_on_a_cpu_the_budget_is_of_the_process(
    node: LocalNode, comfy_ui: comfy_standin.ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ComfyUI started with --cpu."""
    monkeypatch.setattr(
        sys.modules["comfy.model_management"], "get_torch_device", lambda: torch.device("cpu")
    )
    image, text = draw(node, "shapes", device="auto", budget="", ram="", steps=2)
    assert image.shape == (1, 64, 64, 3)
    assert " of memory" in text.partition("\n\n")[0]
    patcher, session = node.engine.patcher, node.engine.session
    assert session is not None
    assert patcher.load_device == torch.device("cpu")
    assert patcher.loaded_size() == session.held_bytes > 0
    patcher.detach()
    assert patcher.loaded_size() == session.device.allocated_bytes == 0


def request(graph: str = "flux-tiny", **values: Any) -> LocalRequest:
    extra_inputs = values.pop("extra_inputs", {})
    budgets = {name: values.pop(name, "") for name in ("budget", "ram")}
    node_values = {"prompt": "a", "seed": 0, **values}
    return LocalRequest(
        graph, "sim", **budgets, allow=(), values=node_values, extra_inputs=extra_inputs
    )


def test_inputs_have_the_names_of_the_graph() -> None:
    graph = graphrun.load("flux-tiny")
    values = inputs_for(graph, request(width=64, steps=2, extra_inputs={"guidance_scale": "2"}))
    assert (values["width"], values["height"], values["steps"]) == (64, 128, 2)
    assert values["guidance_scale"] == 2.0
    assert values.keys() == graph.inputs.keys()
    picture = Image.new("RGB", (64, 64))
    values = inputs_for(graphrun.load("sdxl-img2img-tiny"), request(image=picture))
    assert values["image"] is picture


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"negative_prompt": "x"}, "negative_prompt: flux-tiny has no such input; empty it"),
        ({"image": Image.new("RGB", (8, 8))}, "image: flux-tiny has no such input; disconnect it"),
        (
            {"extra_inputs": {"guidance": "2"}},
            "unknown input 'guidance'; did you mean 'guid",
        ),
        ({"extra_inputs": {"seed": "2"}}, "inputs: seed has a value in the node already"),
        ({"width": 30}, "30 is not a multiple of 16; use 16 or 32"),
    ],
)
def test_inputs_that_the_graph_does_not_take(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        inputs_for(graphrun.load("flux-tiny"), request(**values))


def test_budgets_of_each_kind_of_device() -> None:
    sim, card = (data_sheet_estimates()[name] for name in ("sim", "rtx4090"))
    cpu = cpu_estimate()

    def free() -> int:
        return 10 * 2**30

    assert budgets_for(card, request(budget="8G"), free) == {"vram": "8G", "ram": "auto"}
    free_budget = budgets_for(card, request(), free)["vram"]
    assert 9 * 2**30 < free_budget < 11 * 2**30
    assert budgets_for(cpu, request(), free) == {"memory": "auto"}
    assert budgets_for(cpu, request(budget="8G"), free) == {"memory": "8G"}
    with pytest.raises(InputError, match="budget: '8X' is not a size; write it as 8G"):
        budgets_for(cpu, request(budget="8X"), free)
    with pytest.raises(InputError, match="one pool of memory, which budget is for; empty ram"):
        budgets_for(cpu, request(ram="8G"), free)
    with pytest.raises(InputError, match="sim has no memory of its own; type a size, such as 8G"):
        budgets_for(sim, request(), free)


def test_another_allocator_is_noted_on_cards() -> None:
    sim, card = (data_sheet_estimates()[name] for name in ("sim", "rtx4090"))
    assert "--disable-cuda-malloc" in allocator_note(card, "cudaMallocAsync")
    assert allocator_note(sim, "cudaMallocAsync") == allocator_note(card, "native") == ""
    assert allocator_backend() in ("native", "cudaMallocAsync")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("", "graph: type the name of a graph"),
        ("flux-tinny", "did you mean flux-tiny?"),
    ],
)
def test_a_graph_that_is_none(graph: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((GraphError, InputError), match=re.escape(message)):
        engine.open_graph(graph, tmp_path)


def test_free_memory_counts_what_comfyui_can_unload(comfy_ui: comfy_standin.ComfyUI) -> None:
    from graphrun.comfyui.memory import free_bytes

    comfy_ui.model(50 * MIB)
    assert comfy_ui.free() == 14 * MIB
    assert free_bytes(comfy_standin.CARD) == 64 * MIB
