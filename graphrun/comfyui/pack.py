"""The nodes as ComfyUI loads them, by ``from graphrun.comfyui.pack import *``.

With ``comfy_api`` as an extension, else as the mappings of older versions of ComfyUI, which take a
module with mappings first.
"""

from __future__ import annotations

from typing import Any

from graphrun.comfyui.nodes import CATEGORY, MODELS, NODES, NodeInput, NodeKind, server_client
from graphrun.errors import GraphrunError

# options that are parameters of an input of `comfy_api`, with their names there; the others are
# passed through
PARAMETERS = {"dynamicPrompts": "dynamic_prompts"} | {
    name: name for name in ("min", "max", "step", "multiline", "control_after_generate")
}


def classic_class(kind: NodeKind) -> type:
    """Return ``kind`` as a class of the mapping ``NODE_CLASS_MAPPINGS``."""

    def input_types(cls: type) -> dict[str, dict[str, Any]]:
        inputs: dict[str, dict[str, Any]] = {"required": {}, "optional": {}}
        for node_input in kind.inputs:
            group = "optional" if node_input.is_optional else "required"
            inputs[group][node_input.name] = _classic_input(node_input)
        return inputs

    members: dict[str, Any] = {
        "__doc__": kind.description,
        "INPUT_TYPES": classmethod(input_types),
        "RETURN_TYPES": tuple(output_kind for output_kind, _ in kind.outputs),
        "RETURN_NAMES": tuple(name for _, name in kind.outputs),
        "FUNCTION": "execute",
        "CATEGORY": CATEGORY,
        "DESCRIPTION": kind.description,
        "execute": lambda self, **values: kind.run(**values),
    }
    if _has_model(kind):
        members["VALIDATE_INPUTS"] = classmethod(_accept_model)
    return type(kind.id, (), members)


def _classic_input(node_input: NodeInput) -> tuple[Any, dict[str, Any]]:
    options = {**node_input.options, "tooltip": node_input.tooltip}
    if node_input.default is not None:
        options["default"] = node_input.default
    choices = node_input.choices
    return (node_input.kind if choices is None else list(choices())), options


def extension_class(kind: NodeKind, io: Any) -> type:
    """Return ``kind`` as a node of ``comfy_api``, whose module is ``io``."""
    types = {
        "STRING": io.String,
        "INT": io.Int,
        "COMBO": io.Combo,
        "IMAGE": io.Image,
        "MASK": io.Mask,
    }

    def define_schema(cls: type) -> Any:
        return io.Schema(
            node_id=kind.id,
            display_name=kind.title,
            category=CATEGORY,
            description=kind.description,
            inputs=[_extension_input(node_input, types) for node_input in kind.inputs],
            outputs=[types[output].Output(display_name=name) for output, name in kind.outputs],
        )

    def execute(cls: type, /, **values: Any) -> Any:
        return io.NodeOutput(*kind.run(**values))

    members: dict[str, Any] = {
        "__doc__": kind.description,
        "__module__": __name__,
        "define_schema": classmethod(define_schema),
        "execute": classmethod(execute),
    }
    if _has_model(kind):
        members["validate_inputs"] = classmethod(_accept_model)
    return type(kind.id, (io.ComfyNode,), members)


def _extension_input(node_input: NodeInput, types: dict[str, Any]) -> Any:
    parameters = {
        PARAMETERS[name]: value for name, value in node_input.options.items() if name in PARAMETERS
    }
    if node_input.default is not None:
        parameters["default"] = node_input.default
    if node_input.choices is not None:
        parameters["options"] = list(node_input.choices())
    widget = types[node_input.kind].Input(
        node_input.name,
        optional=node_input.is_optional,
        tooltip=node_input.tooltip,
        **parameters,
    )
    # not all inputs of the first version take it as an argument
    widget.extra_dict |= {
        name: value for name, value in node_input.options.items() if name not in PARAMETERS
    }
    return widget


def _has_model(kind: NodeKind) -> bool:
    return any(node_input.is_free for node_input in kind.inputs)


def _accept_model(cls: type, model: str) -> bool:
    """Accept every name: the server knows its models, and its error names them."""
    return True


def _ask_for_models() -> None:
    """Ask the default server for its models, so that the page finds them in the menu."""
    try:
        MODELS.refresh(server_client("", ""))
    except GraphrunError:  # the environment has no address; the node's error says so
        return


try:
    from comfy_api.latest import ComfyExtension, io
except ImportError:  # older than August 2025
    NODE_CLASS_MAPPINGS = {kind.id: classic_class(kind) for kind in NODES}
    NODE_DISPLAY_NAME_MAPPINGS = {kind.id: kind.title for kind in NODES}
    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
else:
    __all__ = ["comfy_entrypoint"]

    class GraphrunExtension(ComfyExtension):  # type: ignore[misc]
        """The nodes of graphrun."""

        async def get_node_list(self) -> list[type]:
            return [extension_class(kind, io) for kind in NODES]

    async def comfy_entrypoint() -> GraphrunExtension:
        """Return the extension with the nodes."""
        return GraphrunExtension()


_ask_for_models()
