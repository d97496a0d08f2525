"""python benchmarks/defects/component_stays.py: a component stays on the device after
``encode_prompt``; what the next one takes.

``enable_model_cpu_offload`` moves a component away when the next one of a fixed list runs. Where
only the prompt is encoded nothing runs after the last encoder, so it stays; the next
``encode_prompt`` then holds it beside the largest of the others.
"""

from __future__ import annotations

from typing import Any

from show import show


def reproduce() -> dict[str, Any]:
    """After HiDream's encode_prompt under enable_model_cpu_offload the last encoder stays; a second
    call peaks higher"""
    import torch
    from peers_cell import subject
    from peers_machine import Sim

    of, on = subject("hidream", "sim", 1), Sim(None)
    pipeline = of.pipeline()
    last_bytes = sum(parameter.nbytes for parameter in pipeline.text_encoder_4.parameters())
    peaks, left = [], []
    with on.open(), torch.no_grad():
        pipeline.enable_model_cpu_offload(device=on.device)
        for _ in range(2):
            on.reset_peak()
            of.encode(pipeline)
            peaks.append(on.peak_bytes())
            left.append(on.allocated_bytes())
        pipeline.remove_all_hooks()
        pipeline.to("cpu")
    shown = left[0] >= last_bytes and peaks[1] > peaks[0]
    return {
        "shown": shown,
        "last_encoder_bytes": last_bytes,
        "left_bytes": left,
        "peak_bytes": peaks,
    }


if __name__ == "__main__":
    show(reproduce)
