"""A user's process: prints its state before and after actions of graphrun, as JSON.

python guest.py ACTION,ACTION BACKEND FOLDER   BACKEND: "" or the label of a backend to register
                                               first; FOLDER/flux has a saved pipeline
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def answer(ask: Callable[[], Any]) -> str:
    """What ``ask()`` returns or raises, as text."""
    try:
        return str(ask())
    except Exception as error:  # noqa: BLE001  (the error is an answer)
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def state() -> dict[str, Any]:
    """What PyTorch, NumPy and Python say of the process."""
    import numpy as np
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def digest(value: Any) -> str:
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]

    def pinned_by_a_loader() -> Any:
        loader = torch.utils.data.DataLoader([torch.zeros(1)], pin_memory=True)
        return [tensor.is_pinned() for tensor in loader]

    keys = ("PrivateUse1", "AutocastPrivateUse1", "AutogradPrivateUse1", "AutocastCUDA", "Meta")
    operators = (
        "aten::empty.memory_format",
        "aten::linear",
        "aten::_to_copy",
        "aten::mm",
        "aten::scaled_dot_product_attention",
    )
    kernels = {
        f"{key} {name}": torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in keys
        for name in operators
    }
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # a loader draws a seed
        warnings.simplefilter("ignore")
        loader = answer(pinned_by_a_loader)
    return {
        "accelerator": answer(torch.accelerator.current_accelerator),
        "accelerator is available": answer(torch.accelerator.is_available),
        "accelerator memory": answer(torch.accelerator.memory_allocated),
        "privateuse1 backend": torch._C._get_privateuse1_backend_name(),
        "device modules": [
            name for name in ("sim", "stranger", "privateuseone") if hasattr(torch, name)
        ],
        "pin_memory": answer(lambda: torch.zeros(1).pin_memory().is_pinned()),
        "loader with pin_memory": loader,
        "kernels": kernels,
        "cuda is initialized": torch.cuda.is_initialized(),
        "cuda calls that wait": len(torch.cuda._queued_calls),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "gradients": torch.is_grad_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
            for kind in ("cpu", "cuda")
        ],
        "autocast is original": [
            torch.autocast.__init__.__module__,
            torch.autocast.__enter__.__module__,
        ],
        "modes": [len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()],
        "threads of torch": torch.get_num_threads(),
        "precision of products": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random state of torch": digest(torch.get_rng_state().tolist()),
        "random state of numpy": digest(np.random.get_state()),
        "random state of python": digest(random.getstate()),
        "garbage collection": [gc.isenabled(), *gc.get_threshold(), gc.get_freeze_count()],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "paths": sys.path.copy(),
        "warnings filters": list(map(str, warnings.filters)),
        "signal handlers": {
            str(number): str(signal.getsignal(number)) for number in signal.valid_signals()
        },
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "hooks": [
            str(hook)
            for hook in (
                sys.excepthook,
                sys.unraisablehook,
                threading.excepthook,
                warnings.showwarning,
            )
        ],
        "root logger": [logging.root.level, *map(str, logging.root.handlers)],
        "loggers' filters": [
            name
            for name in sorted(logging.root.manager.loggerDict)
            if any(
                type(filter_).__module__.startswith("graphrun")
                for filter_ in logging.getLogger(name).filters
            )
        ],
    }


def register_backend() -> None:
    """Another backend in PyTorch's one slot, as that of an NPU would be."""
    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    class Module:
        def is_initialized(self) -> bool:
            return True

        def is_available(self) -> bool:
            return True

        def _is_in_bad_fork(self) -> bool:
            return False

        def device_count(self) -> int:
            return 1

        def current_device(self) -> int:
            return 0

        def manual_seed_all(self, seed: int) -> None:
            pass

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    _setup_privateuseone_for_python_backend("stranger", backend_module=Module())


def prepared(action: str, folder: Path) -> Callable[[], Any]:
    """What a user does, with everything ready that is not graphrun's."""
    if action in ("attach", "attach to the CPU"):
        import diffusers

        pipe = diffusers.FluxPipeline.from_pretrained(folder / "flux")
        pipe.set_progress_bar_config(disable=True)
        call(pipe)
        return lambda: attach(pipe, on_card=action == "attach")
    actions = {
        "import graphrun": lambda: __import__("graphrun"),
        "plan": lambda: estimate(plan=True),
        "estimate": estimate,
        "import a folder": lambda: import_folder(folder),
        "serve": lambda: serve(folder),
        "sim": sim,
    }
    return actions[action]


def call(pipe: Any) -> None:
    """A call that draws from its own generator."""
    import torch

    generator = torch.Generator().manual_seed(1)
    pipe(
        "a lighthouse",
        height=16,
        width=16,
        num_inference_steps=2,
        max_sequence_length=16,
        generator=generator,
    )


def attach(pipe: Any, *, on_card: bool) -> None:
    """Attaches to a device that calls itself a card, or to the CPU, calls the pipeline and
    detaches."""
    from card import Card

    import graphrun

    if on_card:
        graphrun.attach(pipe, vram="1G", ram="8G", hardware="rtx4090", device=Card())
    else:
        graphrun.attach(pipe, memory="8G", device="cpu")
    call(pipe)
    pipe.graphrun.detach()


def estimate(*, plan: bool = False) -> None:
    """Estimates a graph, and plans it if ``plan``."""
    import graphrun

    graph = graphrun.load(ROOT / "graphs" / "flux-tiny.yaml")
    problem = graphrun.estimate(graph, vram="1G", ram="8G", hardware="rtx4090")
    if plan:
        graphrun.plan(problem)


def sim() -> None:
    """Makes a simulated accelerator."""
    from graphrun.sim import Machine

    Machine()


def import_folder(folder: Path) -> None:
    """Imports a saved pipeline."""
    from graphrun.diffusers_.importing.imported import ImportOptions, import_source

    import_source(str(folder / "flux"), ImportOptions({}, {})).write(
        folder / "flux.yaml", overwrite=True
    )


def serve(folder: Path) -> None:
    """Plans a request as the server's planner does."""
    import graphrun
    from graphrun.profile.hardware_profiles import hardware
    from graphrun.serve.catalog import GraphVariant
    from graphrun.serve.planner import plan_forever
    from graphrun.serve.settings import Settings
    from graphrun.serve.shares import WHOLE

    parent_end, child_end = multiprocessing.Pipe()
    budgets = {"vram": "1G", "ram": 8 * 2**30}
    cards = (hardware("rtx4090", None),)
    graphs = (ROOT / "graphs" / "flux-tiny.yaml",)
    variant = GraphVariant(graphrun.load(graphs[0]))
    settings = Settings(
        graphs, (), budgets, cards, folder / "cache", "none", folder, {}, graphrun.__version__
    )
    parent_end.send(
        (
            "plan",
            {"variant": variant, "key": 1, "inputs": {"prompt": "a lighthouse"}, "share": WHOLE},
        )
    )
    parent_end.send(("stop", None))
    plan_forever(child_end, settings)
    assert parent_end.recv()[0] == "planned"


if __name__ == "__main__":
    actions, backend, folder = sys.argv[1:]
    import accelerate  # noqa: F401
    import diffusers  # noqa: F401
    import scipy.sparse  # noqa: F401
    import scipy.special  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    if backend:
        register_backend()
    states = {}
    for action in actions.split(","):
        act = prepared(action, Path(folder))
        previous_state = state()
        act()
        states[action] = (previous_state, state())
    print(json.dumps(states))
