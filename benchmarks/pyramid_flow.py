"""Attach Pyramid-Flow's own code with tiny random weights, and compare it bit for bit.

    python benchmarks/pyramid_flow.py --code FOLDER    minutes; writes results/pyramid_flow.json

FOLDER: a checkout of https://github.com/jy0205/Pyramid-Flow. It needs einops, timm, torchvision,
tensorboardX and ipython. Every call within half of the weights' bytes is compared with the same
call of a model that is entirely on the simulated accelerator. Plans at true size:
`benchmarks/graph_table.py pyramid-flow`, with FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
sys.path[:0] = [str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers as t  # noqa: E402
from PIL import Image  # noqa: E402

import graphrun  # noqa: E402
from graphrun.errors import GraphrunError  # noqa: E402
from graphrun.runtime.devices.simulated import SimulatedDevice  # noqa: E402
from graphrun.sim import Machine  # noqa: E402

RESULTS = HERE / "results" / "pyramid_flow.json"
SHARE = 0.5  # of the bytes of the weights: the budget of the attached calls
# the constructor's default, 1/3, makes a singular covariance, which newer versions of torch refuse
GAMMA = 0.3333


def write_tiny(folder: Path) -> None:
    """Write random weights in the layout of the checkpoint. Its own classes start with zeros, so
    all are drawn again."""
    from pyramid_dit.flux_modules import PyramidFluxTransformer
    from video_vae.modeling_causal_vae import CausalVideoVAE

    torch.manual_seed(0)
    widths = dict.fromkeys(
        ("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8, 16, 16)
    )
    layers = dict.fromkeys(("encoder_layers_per_block", "decoder_layers_per_block"), (1, 1, 1, 1))
    groups = dict.fromkeys(("encoder_norm_num_groups", "decoder_norm_num_groups"), 4)
    sizes = {
        "num_layers": 3,
        "num_single_layers": 6,
        "num_attention_heads": 4,
        "attention_head_dim": 64,
        "in_channels": 16,
    }
    modules = {
        "diffusion_transformer_768p": PyramidFluxTransformer(
            joint_attention_dim=32, pooled_projection_dim=32, **sizes
        ),
        "causal_video_vae": CausalVideoVAE(
            encoder_out_channels=4, decoder_in_channels=4, **widths, **layers, **groups
        ),
        "text_encoder": t.CLIPTextModel(
            t.CLIPTextConfig(
                vocab_size=200,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                projection_dim=32,
                bos_token_id=0,
                eos_token_id=1,
            )
        ),
        "text_encoder_2": t.T5EncoderModel(
            t.T5Config(vocab_size=200, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2)
        ),
    }
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            torch.nn.init.normal_(
                parameter, float(parameter.dim() == 1 and key.endswith("weight")), 0.05
            )
        module.save_pretrained(folder / name)
    letters = [chr(number) for number in range(33, 127)]
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *(letter + end for end in ("", "</w>") for letter in letters),
    ]
    t.CLIPTokenizer(
        vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=77
    ).save_pretrained(folder / "tokenizer")
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", -9.0),
        ("\u2581", -2.0),
        *((letter, -3.0) for letter in letters),
    ]
    t.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512).save_pretrained(
        folder / "tokenizer_2"
    )


def made(folder: Path) -> Any:
    """Return Pyramid-Flow's object with the weights in ``folder``."""
    from pyramid_dit import PyramidDiTForVideoGeneration

    kinds = {"model_name": "pyramid_flux", "model_variant": "diffusion_transformer_768p"}
    return PyramidDiTForVideoGeneration(
        str(folder), model_dtype="fp32", scheduler_gamma=GAMMA, **kinds
    )


def generate(model: Any, text: str = "a lighthouse at dusk", **options: Any) -> Any:
    """Return frames as bytes ``[frames, height, width, 3]``. Noise comes from the generator and
    from torch's own, both seeded."""
    torch.manual_seed(1)
    steps = {"num_inference_steps": [2, 2, 2], "video_num_inference_steps": [1, 1, 1]}
    arguments = {"height": 64, "width": 64, "temp": 3, **steps, **options}
    return np.stack(
        [
            np.asarray(i)
            for i in model.generate(
                prompt=text, generator=torch.Generator().manual_seed(0), **arguments
            )
        ]
    )


def animate(model: Any) -> Any:
    """Return the frames made from a picture."""
    torch.manual_seed(1)
    picture = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))
    frames = model.generate_i2v(
        "a lighthouse",
        input_image=picture,
        temp=2,
        num_inference_steps=[1, 1, 1],
        generator=torch.Generator().manual_seed(0),
    )
    return np.stack([np.asarray(frame) for frame in frames])


def tiled(model: Any) -> Any:
    """Return one frame decoded in two tiles."""
    model.vae.enable_tiling()
    try:
        return generate(model, temp=1, height=64, width=320)
    finally:
        model.vae.disable_tiling()


CALLS: dict[str, Callable[[Any], Any]] = {
    "generate": generate,
    "generate, second call": generate,
    "generate, another text": lambda model: generate(model, "two ships in a storm"),
    "generate, another length": lambda model: generate(model, temp=2),
    "generate, without guidance": lambda model: generate(model, guidance_scale=0.0),
    "generate_i2v": animate,
    "generate, tiled": tiled,
    "generate, autocast": generate,
    "generate, after autocast": generate,
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "generate(cpu_offloading=True)": lambda model: generate(model, cpu_offloading=True),
    "enable_sequential_cpu_offload()": lambda model: model.enable_sequential_cpu_offload(),
}


def tiny(folder: Path) -> dict[str, Any]:
    """Run each of `CALLS` within half of the weights' bytes; record `REFUSED`'s messages."""
    with quiet():
        write_tiny(folder)
        model = made(folder)
    parts = {name: getattr(model, name) for name in ("text_encoder", "dit", "vae")}
    weights = sum(
        tensor.nbytes for part in parts.values() for tensor in (*part.parameters(), *part.buffers())
    )
    device, rows, messages = SimulatedDevice(Machine()), {}, {}
    entries = ["generate", "generate_i2v"]
    with graphrun.attach(
        model, components=parts, entries=entries, vram=int(SHARE * weights), device=device
    ) as attachment:
        for name, call in CALLS.items():
            with quiet():
                context = autocast if name == "generate, autocast" else nullcontext
                expected = on_device(folder, call, context)
                with context():
                    output = call(model)
            assert attachment.trace is not None
            assert attachment.solution is not None
            rows[name] = {
                "equal": bool(np.array_equal(output, expected)),
                "frames": len(output),
                "peak_mib": round(attachment.trace.peak_bytes / 2**20, 2),
                "entries_planned_in_the_call": list(attachment.replans),
                "plan": attachment.solution.problem.digest,
            }
            print(name, rows[name], flush=True)
        for name, call in REFUSED.items():
            try:
                with quiet():
                    call(model)
                messages[name] = "not refused"
            except GraphrunError as error:
                messages[name] = str(error)
    with quiet():
        is_restored = bool(np.array_equal(generate(model), generate(made(folder))))
    leftover_bytes = device.allocated_bytes
    return {
        "weights_mib": round(weights / 2**20, 2),
        "budget_mib": round(SHARE * weights / 2**20, 2),
        "calls": rows,
        "refused": messages,
        "equal_after_detach": is_restored,
        "left_bytes": leftover_bytes,
    }


def autocast() -> AbstractContextManager[Any]:
    """The autocast of its README."""
    return torch.autocast("sim", torch.bfloat16)


def on_device(
    folder: Path, call: Callable[[Any], Any], context: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """Return the result of ``call`` with a model that is entirely on the simulated accelerator."""
    model = made(folder)
    with SimulatedDevice(Machine()).machine, context():
        for part in (model.text_encoder, model.dit, model.vae):
            part.to("sim")
        return call(model)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress its output, except errors."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


def import_from(code: Path) -> list[Any]:
    """Put ``code`` on Python's path. A torchvision made for CUDA expects two operators that are
    missing from a torch without CUDA: they are declared while the returned list is alive."""
    sys.path[:0] = [str(code)]
    libraries = [] if torch.cuda.is_available() else [torch.library.Library("torchvision", "DEF")]
    for library in libraries:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return libraries


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--code", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    if not (options.code / "pyramid_dit").is_dir():
        parser.error(f"{options.code} is no checkout of https://github.com/jy0205/Pyramid-Flow")
    importer = import_from(options.code.resolve())
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "-C", options.code, "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    results: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread, Python "
        f"{platform.python_version()}",
        "versions": {
            name: version(name)
            for name in ("torch", "diffusers", "transformers", "einops", "timm", "torchvision")
        },
        "code": f"github.com/jy0205/Pyramid-Flow at {commit.stdout.strip()}",
    }
    with tempfile.TemporaryDirectory() as folder:
        results["tiny"] = tiny(Path(folder))
    del importer
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
