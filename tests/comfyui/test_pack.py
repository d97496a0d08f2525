"""What ComfyUI loads: the extension, the mappings of older versions, and the workflows."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy_standin
import pytest

from graphrun.comfyui.install import WORKFLOWS
from graphrun.comfyui.nodes import NODES

BY_ID = {kind.id: kind for kind in NODES}


def loaded_pack(patch: pytest.MonkeyPatch, *, with_api: bool) -> ModuleType:
    """The module as a new process loads it."""
    comfy_standin.install(patch, with_api=with_api)
    patch.setenv("GRAPHRUN_URL", "http://127.0.0.1:9")  # where nothing listens
    patch.delitem(sys.modules, "graphrun.comfyui.pack", raising=False)
    for name in () if with_api else ("comfy_api", "comfy_api.latest"):
        patch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    pack = importlib.import_module("graphrun.comfyui.pack")
    patch.delitem(sys.modules, "graphrun.comfyui.pack")
    return pack


def extension_nodes(pack: ModuleType) -> dict[str, Any]:
    extension = asyncio.run(pack.comfy_entrypoint())
    nodes = asyncio.run(extension.get_node_list())
    return {node.define_schema().node_id: node for node in nodes}


def test_an_extension_of_this_year(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI takes a module with mappings as one of older versions, so there are none."""
    pack = loaded_pack(monkeypatch, with_api=True)
    assert pack.__all__ == ["comfy_entrypoint"]
    assert not hasattr(pack, "NODE_CLASS_MAPPINGS")
    nodes = extension_nodes(pack)
    assert nodes.keys() == BY_ID.keys()
    for name, node in nodes.items():
        schema = node.define_schema()
        assert schema.display_name == BY_ID[name].title
        assert [(output.kind, output.display_name) for output in schema.outputs] == [
            *BY_ID[name].outputs
        ]
    assert nodes["GraphrunServer"].validate_inputs(model="a model that the menu lacks") is True
    assert not hasattr(nodes["GraphrunLocal"], "validate_inputs")


def test_both_forms_have_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = extension_nodes(loaded_pack(monkeypatch, with_api=True))
    pack = loaded_pack(monkeypatch, with_api=False)
    assert pack.__all__ == ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
    assert not hasattr(pack, "comfy_entrypoint")
    for name, classic in pack.NODE_CLASS_MAPPINGS.items():
        types = classic.INPUT_TYPES()
        described = {
            (input_name, group, options["tooltip"], options.get("default"), options.get("max"))
            for group, entries in types.items()
            for input_name, (_, options) in entries.items()
        }
        assert described == {
            (
                node_input.id,
                "optional" if node_input.optional else "required",
                node_input.tooltip,
                node_input.options.get("default"),
                node_input.options.get("max"),
            )
            for node_input in nodes[name].define_schema().inputs
        }
        assert types["optional"]["image"][0] == "IMAGE"
        advanced = {
            input_name
            for input_name, (_, options) in types["optional"].items()
            if options.get("advanced")
        }
        schema = nodes[name].define_schema()
        assert advanced == {item.id for item in schema.inputs if item.options.get("advanced")}
        assert "inputs" in advanced
        assert types["required"]["seed"][1]["control_after_generate"] is True
        assert types["required"]["prompt"][1]["dynamicPrompts"] is True
    devices = pack.NODE_CLASS_MAPPINGS["GraphrunLocal"].INPUT_TYPES()["required"]["device"][0]
    assert devices[0] == "auto"
    assert "cpu" in devices
    assert pack.NODE_CLASS_MAPPINGS["GraphrunServer"].VALIDATE_INPUTS(model="another") is True


def test_both_forms_call_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(**values: Any) -> tuple[Any, ...]:
        return values["prompt"], "plan"

    pack = loaded_pack(monkeypatch, with_api=True)
    kind = BY_ID["GraphrunLocal"]
    echo = type(kind)(kind.id, kind.title, "", kind.inputs, kind.outputs, drawn)
    io = sys.modules["comfy_api.latest"].io
    assert pack.extension_class(echo, io).execute(prompt="a").args == ("a", "plan")
    classic = pack.classic_class(echo)
    assert getattr(classic(), classic.FUNCTION)(prompt="a") == ("a", "plan")
    assert classic.RETURN_TYPES == ("IMAGE", "STRING")


def test_loading_the_nodes_imports_neither_torch_nor_packages_that_comfyui_has_not() -> None:
    """ComfyUI itself needs numpy, Pillow, psutil, pydantic, pyyaml, tqdm and more."""
    code = (
        "import sys; from graphrun.comfyui import pack;"
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'torch', 'diffusers', 'fastapi', 'highspy', 'scipy', 'numpy', 'typer', 'filelock'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def workflow(name: str) -> Any:
    return json.loads((WORKFLOWS / name).read_text(encoding="utf-8"))


def widgets(node: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a node in a workflow of the page, by the names of its widgets."""
    names: list[str] = []
    for node_input in BY_ID[node["type"]].inputs:
        if node_input.kind not in ("IMAGE", "MASK"):
            names.append(node_input.name)
        if "control_after_generate" in node_input.options:
            names.append("control_after_generate")
    return dict(zip(names, node["widgets_values"], strict=True))


@pytest.mark.parametrize("name", ["graphrun-server", "graphrun-in-process"])
def test_workflows_are_of_these_nodes(name: str) -> None:
    """For the page and for the API, with the same values."""
    page_nodes = {node["id"]: node for node in workflow(f"{name}.json")["nodes"]}
    api_nodes = workflow(f"{name}.api.json")
    assert {str(id) for id in page_nodes} == api_nodes.keys()
    graphrun_node = api_nodes["1"]
    kind = BY_ID[graphrun_node["class_type"]]
    required = {item.name for item in kind.inputs if not item.is_optional}
    assert required <= graphrun_node["inputs"].keys() <= {item.name for item in kind.inputs}
    values = widgets(page_nodes[1])
    assert values.pop("control_after_generate") == "fixed"
    assert values == graphrun_node["inputs"]
    assert [output["type"] for output in page_nodes[1]["outputs"]] == [
        output_kind for output_kind, _ in kind.outputs
    ]


def test_there_are_no_other_workflows() -> None:
    assert {path.name.partition(".")[0] for path in Path(WORKFLOWS).iterdir()} == {
        "graphrun-server",
        "graphrun-in-process",
    }
