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

    model_subject, simulator = subject("hidream", "sim", 1), Sim(None)
    pipeline = model_subject.pipeline()
    last_bytes = sum(parameter.nbytes for parameter in pipeline.text_encoder_4.parameters())
    peaks, leftover_bytes = [], []
    with simulator.open(), torch.no_grad():
        pipeline.enable_model_cpu_offload(device=simulator.device)
        for _ in range(2):
            simulator.reset_peak()
            model_subject.encode(pipeline)
            peaks.append(simulator.peak_bytes())
            leftover_bytes.append(simulator.allocated_bytes())
        pipeline.remove_all_hooks()
        pipeline.to("cpu")
    is_shown = leftover_bytes[0] >= last_bytes and peaks[1] > peaks[0]
    return {
        "shown": is_shown,
        "last_encoder_bytes": last_bytes,
        "left_bytes": leftover_bytes,
        "peak_bytes": peaks,
    }


if __name__ == "__main__":
    show(reproduce)
