"""``graphrun fit owner/name`` plans from configurations and headers of weights: the answer is that
for the same folder on disk, and the hub sends kilobytes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from hub_server import MEMBER, VISITOR, Hub, Repository, connect
from huggingface_hub import constants
from import_whole import saved
from original_layouts import GGUF_TYPES, write_gguf, write_hollow
from quantized_folders import quantized_flux
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_pipelines import cases, modular

import graphrun as package
from graphrun.modules.bitsandbytes_files import packed_weights
from graphrun.modules.hub import snapshot as snapshot_of
from graphrun.modules.hub_headers import stand_in
from graphrun.modules.source_files import stored_tensors

Cli = Callable[..., tuple[int, str, str]]
COMMIT = "c" * 40
LAPTOP = ("--card", "rtx4060laptop", "--ram", "16G", "--no-cache", "--json")
WORDS, MANY_WORDS = (
    320,
    2**18,
)  # of the text encoders: as the tiny ones have, and as files have here
MOST_BYTES = 1_000_000
KINDS = {  # in place of the dtypes in files: the configurations still say fp32 or fp16
    "torch.float32": "BF16",
    "torch.float16": "BF16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
}


def plain(name: str, folder: Path) -> Path:
    return saved(name, folder).folder


def fp16_variant(folder: Path) -> Path:
    """All weights only in files of the variant fp16, as in many repositories."""
    target = folder / "variant"
    cases()["StableDiffusionXLPipeline-float16"].build().save_pretrained(target, variant="fp16")
    return target


def sharded(folder: Path) -> Path:
    target = folder / "sharded"
    cases()["StableDiffusion3Pipeline"].build().save_pretrained(target, max_shard_size="500KB")
    assert len(list((target / "transformer").glob("*.safetensors"))) > 1
    return target


def quantized(kind: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        name = "FluxPipeline" if kind == "nested" else "FluxImg2ImgPipeline"
        target = plain(name, folder)
        quantized_flux(target / "transformer", kind)
        return target

    return build


def fp8(folder: Path) -> Path:
    target = plain("QwenImagePipeline", folder)
    (file,) = (target / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    save_file(
        {
            name: tensor.to(torch.float8_e4m3fn if tensor.dim() == 2 else torch.bfloat16)
            for name, tensor in tensors.items()
        },
        file,
    )
    return target


def gguf_only(folder: Path) -> Path:
    """The transformer has a GGUF file and no safetensors."""
    target = plain("ChromaPipeline", folder)
    (file,) = (target / "transformer").glob("*.safetensors")

    def kind(_: str, tensor: torch.Tensor) -> Any:
        return (
            GGUF_TYPES.Q8_0 if tensor.dim() == 2 and tensor.shape[1] % 32 == 0 else GGUF_TYPES.F32
        )

    write_gguf(file.with_name("chroma-Q8_0.gguf"), load_file(file), kind)
    file.unlink()
    return target


def pickled(folder: Path) -> Path:
    """The text encoder has a pickle, which is never read."""
    target = plain("SanaPipeline", folder)
    for file in (target / "text_encoder").glob("*.safetensors"):
        file.unlink()
    with (target / "text_encoder" / "pytorch_model.bin").open("wb") as file:
        file.truncate(2**25)
    return target


def with_original(folder: Path) -> Path:
    """The repository also has the original authors' checkpoint, which no component reads."""
    target = plain("IFPipeline", folder)
    write_hollow(target / "if-xl.safetensors", {"weight": (2**23,)})
    return target


def of_two_repositories(folder: Path) -> Path:
    """A modular pipeline whose T5 is in another repository."""
    target = folder / "modular"
    modular("FluxPipeline").save_pretrained(str(target), overwrite_modular_index=True)
    other = folder / "encoders"
    shutil.move(target / "text_encoder_2", other / "text_encoder_2")
    set_location(target, str(other))
    return target


def set_location(folder: Path, location: str) -> None:
    file = folder / "modular_model_index.json"
    index = json.loads(file.read_text())
    index["text_encoder_2"][2]["pretrained_model_name_or_path"] = location
    file.write_text(json.dumps(index))


BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "classic": lambda folder: plain("StableDiffusionPipeline", folder),
    "fp16 variant": fp16_variant,
    "sharded": sharded,
    "nf4": quantized("nested"),
    "int8": quantized("int8"),
    "fp8": fp8,
    "GGUF": gguf_only,
    "pickled": pickled,
    "with original": with_original,
    "video": lambda folder: plain("AnimateDiffPipeline", folder),
    "list": lambda folder: plain("StableDiffusionControlNetPipeline-two", folder),
    "modular": of_two_repositories,
}


def enlarge(folder: Path) -> None:
    """Gives text encoders a vocabulary of `MANY_WORDS`, so that a download of weights would be
    noticed, and all weights another dtype, both in files without values."""
    for config in folder.rglob("config.json"):
        text = config.read_text()
        config.write_text(text.replace(f'"vocab_size": {WORDS}', f'"vocab_size": {MANY_WORDS}'))
        for file in config.parent.glob("*.safetensors"):
            shapes, kinds = dict[str, tuple[int, ...]](), dict[str, str]()
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118
                    tensor = content.get_tensor(name)
                    words = tensor.dim() == 2 and tensor.shape[0] == WORDS
                    shapes[name] = (MANY_WORDS, tensor.shape[1]) if words else tuple(tensor.shape)
                    kinds[name] = KINDS.get(str(tensor.dtype), "")
            if {"BF16", "F8_E4M3"}.issuperset(kinds.values()):
                write_hollow(file, shapes, kinds)


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def fit(graphrun: Cli, model: str) -> list[dict[str, Any]]:
    code, output, err = graphrun("fit", model, *LAPTOP)
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(output)["choices"]
    for row in rows:
        assert row.pop("command").startswith(f"graphrun import {model} -o ")
    return rows


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize("name", BUILDERS)
def test_the_answer_is_that_for_the_same_folder(
    name: str,
    graphrun: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    folder = BUILDERS[name](tmp_path)
    repositories = {"org/name": folder}
    enlarge(tmp_path)
    expected = fit(graphrun, str(folder))
    if name == "modular":
        repositories["org/encoders"] = tmp_path / "encoders"
        set_location(folder, "org/encoders")
    served = {
        key: Repository({COMMIT: contents(place)}, {"main": COMMIT})
        for key, place in repositories.items()
    }
    if name == "modular":
        shutil.move(tmp_path / "encoders", tmp_path / "gone")
    with Hub(served) as hub:
        connect(hub, tmp_path / "hub", monkeypatch)
        assert fit(graphrun, "org/name") == expected
    sizes = {
        path: len(data) for item in served.values() for path, data in item.commits[COMMIT].items()
    }
    weight_bytes = sum(
        size for path, size in sizes.items() if path.endswith((".safetensors", ".gguf", ".bin"))
    )
    sent_bytes = sum(hub.sent_bytes.values())
    record_property(
        "figures", {"weights": weight_bytes, "sent": sent_bytes, "requests": len(hub.requests)}
    )
    assert weight_bytes > 16 * MOST_BYTES
    assert sent_bytes < MOST_BYTES
    assert not any(path.endswith((".bin", "if-xl.safetensors")) for path in hub.sent_bytes)


def test_one_state_of_nf4_weights_is_fetched_and_stands_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights lie between the states, so that neighbouring ranges cannot be one request."""
    tensors = {}
    for number in range(50):
        weight = torch.zeros(96, 1024)
        data, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        tensors[f"{number}.weight"] = data
        tensors |= {f"{number}.weight.{key}": t for key, t in state.as_dict(packed=True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    files = {
        "config.json": b"{}",
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
    }
    with Hub({"org/name": Repository({COMMIT: files}, {"main": COMMIT})}) as hub:
        connect(hub, tmp_path / "hub", monkeypatch)
        snapshot = snapshot_of("org/name", None, ("*.json",), ())
        folder = stand_in("org/name", snapshot)
    ranges = [text for _, path, text in hub.requests if path.startswith("/model.safe") or text]
    assert len(ranges) <= 4, "the header and one state, each after a redirect"
    assert sum(hub.sent_bytes.values()) < 60_000
    packed = packed_weights({tensor.name: tensor for tensor in stored_tensors(folder, "")})
    assert len(packed) == 50
    assert packed["7.weight"].shaped((96, 1024)).shape == (96, 1024)
    assert packed["7.weight"].shaped((96, 1025)).shape == (96 * 1024,), "not as many elements"


@pytest.fixture
def classic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = plain("StableDiffusionPipeline", tmp_path)
    enlarge(tmp_path)
    files = contents(folder)
    single = {name: data for name, data in files.items() if name.startswith("unet/")}
    repositories = {
        "org/name": Repository({COMMIT: files}, {"main": COMMIT}),
        "org/gated": Repository({COMMIT: files}, {"main": COMMIT}, "auto"),
        "org/component": Repository(
            {COMMIT: {name.removeprefix("unet/"): data for name, data in single.items()}},
            {"main": COMMIT},
        ),
        "org/weights": Repository({COMMIT: {"model.safetensors": b"no"}}, {"main": COMMIT}),
    }
    with Hub(repositories) as hub:
        connect(hub, tmp_path / "hub", monkeypatch)
        yield hub


@pytest.mark.parametrize(
    ("model", "token", "words"),
    [
        ("org/none", "", "there is no such repository, or it is private"),
        ("org/gated", "", "it is gated; accept its licence on "),
        ("org/gated", VISITOR, "the account in use has no access; ask for it on "),
        ("org/component", "", "org/component has no model_index.json: it is a component's folder"),
        ("org/weights", "", "org/weights has no model_index.json: it is no pipeline of diffusers"),
    ],
)
def test_what_fit_of_a_repository_refuses(
    classic: Hub,
    graphrun: Cli,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    token: str,
    words: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    code, output, err = graphrun("fit", model, *LAPTOP)
    assert (code, output) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_without_a_network_fit_names_a_folder_as_the_way(
    classic: Hub, graphrun: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    code, output, err = graphrun("fit", "org/name", *LAPTOP)
    assert (code, output) == (2, "")
    assert "without a network, give a folder" in " ".join(err.split())


@pytest.mark.sweep("more")
def test_the_screen_names_what_was_planned_without_headers(
    classic: Hub, graphrun: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With configurations in the hub's cache, from an earlier command, and no network."""
    for endpoint, names in ((constants.ENDPOINT, ""), ("http://127.0.0.1:9", "unet, ")):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        code, output, err = graphrun("fit", "org/name", *LAPTOP)
        assert code == 0, err
        notes = " ".join(json.loads(output)["notes"])
        assert ("planned by the configuration alone" in notes) is bool(names)
        assert names in notes


@pytest.mark.sweep("more")
def test_the_command_of_a_repository_with_only_gguf_files_plans(
    graphrun: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = contents(gguf_only(tmp_path))
    with Hub({"org/name": Repository({COMMIT: files}, {"main": COMMIT})}) as hub:
        connect(hub, tmp_path / "hub", monkeypatch)
        code, output, err = graphrun("fit", "org/name", *LAPTOP)
        assert code == 0, err
        for command in json.loads(output)["choices"][0]["command"].split(" && "):
            code, output, err = graphrun(*shlex.split(command)[1:])
            assert code == 0, err
        ranges = [text for _, path, text in hub.requests if path.endswith(".gguf")]
        assert ranges
        assert all(ranges), "only its header was fetched"


def test_a_header_that_is_damaged_is_named(classic: Hub, graphrun: Cli) -> None:
    files = classic.repositories["org/name"].commits[COMMIT]
    files["unet/diffusion_pytorch_model.safetensors"] = b"\xff" * 100
    code, output, err = graphrun("fit", "org/name", *LAPTOP)
    assert (code, output) == (2, "")
    assert "unet/diffusion_pytorch_model.safetensors is truncated or corrupt" in err


@pytest.mark.sweep("more")
def test_an_import_takes_dtypes_from_headers_and_names_the_repository(
    classic: Hub, graphrun: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token, which the store of large files never gets (the server asserts it)."""
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    code, _, err = graphrun("import", "org/gated", "-o", "graph.yaml")
    assert code == 0, err
    text = (tmp_path / "graph.yaml").read_text()
    assert "graphrun-headers" not in text
    assert "source: org/gated" in text
    graph = package.load(tmp_path / "graph.yaml")
    assert graph.components["unet"].dtype == "bfloat16", "its configuration says nothing"
    assert graph.components["unet"].source == "org/gated/unet"
