"""python benchmarks/defects/all_on_the_host.py: a device map that puts a whole module on the host
cannot be dispatched.

``infer_auto_device_map`` returns ``{"": "cpu"}`` where nothing fits the device; ``dispatch_model``
then keeps the weights whose names begin with ``"" + "."``, which are none.
"""

from __future__ import annotations

from typing import Any

from show import show


def reproduce() -> dict[str, Any]:
    """dispatch_model fails on the map that infer_auto_device_map returns where the device has no
    room"""
    import torch
    from accelerate import dispatch_model, infer_auto_device_map
    from peers_cell import Subject
    from peers_machine import Sim

    simulator, message = Sim(None), ""
    with simulator.open(), torch.no_grad():
        module = Subject("hidream", "sim", 1).modules["text_encoder"]
        places = infer_auto_device_map(module, max_memory={0: 0, "cpu": 1 << 40})
        try:
            dispatch_model(module, places, main_device=simulator.device, force_hooks=True)
            module(torch.arange(5, 15)[None].to(simulator.device))
        except KeyError as error:
            message = f"KeyError: {error}"
    return {
        "shown": bool(message),
        "map": {str(k): str(v) for k, v in places.items()},
        "message": message,
    }


if __name__ == "__main__":
    show(reproduce)
