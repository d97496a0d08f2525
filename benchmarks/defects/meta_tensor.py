"""python benchmarks/defects/meta_tensor.py: "Cannot copy out of meta tensor" from an encoder that
accelerate offloads.

Under ``cpu_offload`` (``enable_sequential_cpu_offload``) a module's parameters are on meta between
calls, so ``module.device`` is meta; code that moves inputs there, as pipelines do with a language
model's tokens, computes on meta and cannot come back.
"""

from __future__ import annotations

from typing import Any

from show import show


def reproduce() -> dict[str, Any]:
    """A GLM under accelerate.cpu_offload: inputs moved to module.device are on meta, and no output
    can be had"""
    import accelerate
    import torch
    from peers_cell import Subject

    glm = Subject("cogview4", "sim", 1).modules["text_encoder"]
    accelerate.cpu_offload(glm, "cpu")
    device = glm.device
    tokens = torch.ones(1, 16, dtype=torch.long).to(device)
    message = ""
    try:
        with torch.no_grad():
            glm(tokens).last_hidden_state.cpu()
    except (NotImplementedError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    return {"shown": "meta" in message, "module_device": str(device), "message": message[:200]}


if __name__ == "__main__":
    show(reproduce)
