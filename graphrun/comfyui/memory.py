"""What ComfyUI knows of a session's weights on the device.

    before a run    load_models_gpu([patcher], memory_required=...)  ComfyUI unloads its own models
    between runs    patcher.loaded_size()                            bytes that the plan keeps
    a model needs   patcher.partially_unload(...)                    the session releases
    the device      patcher.detach()                                 everything

ComfyUI asks for bytes, and a session releases all of its weights: a plan's next run begins with the
blocks that the plan keeps, or with none.
"""

from __future__ import annotations

from typing import Any, Protocol


class HeldWeights(Protocol):
    """The weights of a session (`graphrun.session.Session`)."""

    @property
    def held_bytes(self) -> int: ...

    def release(self) -> None: ...


class GraphrunModel:
    """Stands for the weights in ComfyUI's lists and log, where models have the names of classes.

    ComfyUI keeps it by a weak reference and sets attributes.
    """


def patcher_of(weights: HeldWeights, device: Any) -> Any:
    """Return a ModelPatcher of ComfyUI for ``weights`` on ``device``, a torch device.

    ``patcher.size``: the bytes of weights that the next run has on the device; set it before
    `reserve`.
    """
    import torch
    from comfy.model_patcher import ModelPatcher

    class GraphrunPatcher(ModelPatcher):  # type: ignore[misc]
        def is_dynamic(self) -> bool:
            return False

        def model_size(self) -> int:
            return max(int(self.size), weights.held_bytes)

        def loaded_size(self) -> int:
            return weights.held_bytes

        def current_loaded_device(self) -> Any:
            return self.load_device if weights.held_bytes else self.offload_device

        def partially_load(self, *_: Any, **__: Any) -> int:
            """Load nothing: the run does, as its plan says."""
            return 0

        def partially_unload(self, *_: Any, **__: Any) -> int:
            """Release all weights, and return their bytes."""
            nbytes = weights.held_bytes
            weights.release()
            return nbytes

        def detach(self, unpatch_all: bool = True) -> Any:
            """Release all weights; with ``unpatch_all`` false ComfyUI only renews its entry."""
            if unpatch_all:
                weights.release()
            return self.model

    return GraphrunPatcher(GraphrunModel(), device, torch.device("cpu"), size=1)


def reserve(patcher: Any, weights_bytes: int, working_bytes: int) -> None:
    """Make ComfyUI unload models until a run has its memory.

    ``weights_bytes``: the most that the run has on the device; ``working_bytes``: activations and
    everything else.
    """
    from comfy.model_management import load_models_gpu

    patcher.size = max(1, weights_bytes)
    load_models_gpu([patcher], memory_required=working_bytes)


def free_bytes(device: Any) -> int:
    """Return what ``device`` has free once ComfyUI has unloaded its models, in bytes.

    Without what ComfyUI leaves to other programs.
    """
    from comfy import model_management

    models = [model for model in model_management.loaded_models() if model is not None]
    loaded_bytes = sum(model.loaded_size() for model in models if model.load_device == device)
    reserve_bytes = model_management.extra_reserved_memory()
    return max(0, int(model_management.get_free_memory(device) + loaded_bytes - reserve_bytes))
