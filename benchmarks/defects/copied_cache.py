"""python benchmarks/defects/copied_cache.py: a video VAE dispatched by accelerate decodes wrongly,
silently.

The VAE hands its submodules a list, which they fill in place; accelerate's hooks hand them a copy.
``dispatch_model`` takes ``skip_keys`` against that, and diffusers' models name theirs
(``_skip_keys``), but nothing asks for them.
"""

from __future__ import annotations

from typing import Any

from show import show


def reproduce() -> dict[str, Any]:
    """Wan's VAE under accelerate.dispatch_model without skip_keys decodes another video than
    without accelerate"""
    import torch
    from accelerate import dispatch_model, infer_auto_device_map
    from peers_cell import Subject
    from peers_machine import Sim

    def decoded(keys: Any, dispatched: bool) -> Any:
        simulator = Sim(None)
        with simulator.open(), torch.no_grad():
            vae = Subject("wan", "sim", 1).modules["vae"]
            latents = torch.randn(
                1, vae.config.z_dim, 2, 8, 8, generator=torch.Generator().manual_seed(0)
            ).to(simulator.device)
            if dispatched:
                places = infer_auto_device_map(vae, max_memory={0: 1 << 40, "cpu": 1 << 40})
                dispatch_model(
                    vae, places, main_device=simulator.device, skip_keys=keys, force_hooks=True
                )
            else:
                vae.to(simulator.device)
            return vae.decode(latents, return_dict=False)[0].cpu(), list(vae._skip_keys)

    plain, keys = decoded(None, dispatched=False)
    results = {}
    for name, skipped in (("without skip_keys", None), ("with skip_keys", keys)):
        try:
            results[name] = (
                "right" if torch.equal(decoded(skipped, dispatched=True)[0], plain) else "wrong"
            )
        except RuntimeError as error:
            results[name] = f"RuntimeError: {error}"[:120]
    return {"shown": results["without skip_keys"] != "right", **results}


if __name__ == "__main__":
    show(reproduce)
