"""Mutants of every kind of file that graphrun reads, and what may become of them: accepted, or
refused with a typed error.

    graphs    reference graphs with entries or bytes changed        load; one in 50 of those that
    load: estimate plans     problem or actions changed, the digest made again      check; those
    that pass run: the right picture weights   headers of safetensors files        loras   factors,
    alphas, metadata         gguf   keys and tensors tokenizers   all but the vocabulary; build,
    encode      schedulers, components   configurations; build, on meta prompts   JSON lines and CSV

An untyped error, 20 seconds of the processor or 1 GiB more than before are failures.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import resource
import signal
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import yaml

from graphrun.errors import BrokenPlan, GraphrunError
from graphrun.units import GIB

SECONDS = 20
os.environ["RUST_BACKTRACE"] = "0"  # a panic of a tokenizer is one of the outcomes
GRAPHS = Path(__file__).parents[2] / "graphs"
BASES = ("flux-tiny", "sdxl-tiny", "sdxl-inpaint-tiny", "wan-tiny", "hidream-tiny", "sd3-tiny")
SMALL = {"height": 64, "width": 64, "steps": 1, "max_sequence_length": 16}  # of plans that are run

ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        7,
        2**31,
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
        -(2**63),
        0.5,
        -0.0,
        1e308,
        1e-320,
    ),
    *(
        float("inf"),
        float("nan"),
        "",
        "a",
        "\ud800",
        "\u202e\x9b31m",
        "a" * 300,
        "\0",
        "../x",
        "/dev/zero",
        "/",
        ".",
        "~nobody/x",
    ),
    *(
        "$prompt",
        "$encode.embeds",
        "$nothing",
        "$",
        "9" * 50,
        "1e9",
        "inf",
        "8G",
        "diffusers.AutoencoderKL",
        "os.system",
    ),
    *([], {}, [[[]]], {"a": {"b": 1}}, ["a", "a"], [1, 2, 3]),
]
values = st.one_of(
    st.sampled_from(ODD), st.integers(), st.floats(), st.text(max_size=8), st.integers(0, 64)
)


@st.composite
def changed(draw: st.DrawFn, base: Any) -> Any:
    """A copy of the JSON-like ``base`` with one to three entries replaced, removed, doubled, or in
    the place of another one."""
    data = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(data))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        other, from_key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(("value", "value", "near", "remove", "move", "add"))):
            case "value":
                holder[key] = copy.deepcopy(draw(values))
            case "near" if isinstance(holder[key], int | float) and not isinstance(
                holder[key], bool
            ):
                holder[key] += draw(st.sampled_from((-1, 1, 2)))
            case "remove":
                del holder[key]
            case "move":
                holder[key] = copy.deepcopy(other[from_key])
            case "add" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "add":
                holder[str(draw(values))] = copy.deepcopy(holder[key])
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every entry, at any depth."""
    for key, value in (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    ):
        yield data, key
        yield from _places(value)


@st.composite
def with_bytes_changed(draw: st.DrawFn, text: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 4))):
        position, length = draw(st.integers(0, len(text))), draw(st.integers(0, 8))
        text = text[:position] + draw(st.binary(max_size=6)) + text[position + length :]
    return text


@functools.cache
def graph_data(name: str) -> Any:
    return yaml.safe_load((GRAPHS / f"{name}.yaml").read_text())


@st.composite
def graphs(draw: st.DrawFn) -> bytes:
    name = draw(st.sampled_from(BASES))
    if draw(st.integers(0, 4)) == 0:
        return draw(with_bytes_changed((GRAPHS / f"{name}.yaml").read_bytes()))
    text: bytes = yaml.safe_dump(draw(changed(graph_data(name))), sort_keys=False).encode(
        errors="surrogatepass"
    )
    return text


@functools.cache
def beside_graphs() -> Path:
    """A folder with what graphs name, for mutants of them."""
    folder = Path(tempfile.mkdtemp(prefix="graphrun-fuzz-"))
    for name in ("configs", "tokenizers"):
        (folder / name).symlink_to(GRAPHS / name)
    return folder


def read_graph(text: bytes) -> str:
    import graphrun

    path = beside_graphs() / f"{os.getpid()}.yaml"
    path.write_bytes(text)
    graph = graphrun.load(path)
    graph.for_planning({})
    if zlib.crc32(text) % 50:
        return "accepted"
    graphrun.estimate(graph, vram="16M", ram="8G", hardware="sim")
    return "estimated"


@functools.cache
def base_plan() -> tuple[Any, dict[str, Any], Any]:
    """A graph, a plan file's content in which components are streamed, and the picture."""
    import graphrun
    from graphrun.report.plan_files import content
    from graphrun.report.summary import summarize

    path = GRAPHS / "flux-tiny.yaml"
    graph = graphrun.load(path)
    solution = graphrun.plan(
        graphrun.estimate(graph, vram="3M", ram="8G", hardware="sim", inputs=SMALL)
    )
    data = json.loads(
        json.dumps(content(Path("plan.json"), path, solution, summarize(solution, None)))
    )
    picture = graphrun.run(solution, graph, SMALL).outputs["image"]
    return graph, data, picture


@st.composite
def plans(draw: st.DrawFn) -> Any:
    from graphrun.report.plan_files import problem_from

    data = base_plan()[1]
    part = draw(st.sampled_from(("problem", "problem", "phases", "components", "actions", "any")))
    if part == "any":
        return draw(changed(data))
    if part == "actions":
        lines, position = list(data["actions"]), draw(st.integers(1, len(data["actions"]) - 1))
        words = lines[position].split(" ")
        words[draw(st.integers(0, len(words) - 1))] = draw(
            st.sampled_from(" ".join(lines).split() + ["all", "none", "9" * 40])
        )
        lines[position] = " ".join(words)
        return {**data, "actions": lines}
    problem = data["problem"]
    problem = (
        draw(changed(problem))
        if part == "problem"
        else {**problem, part: draw(changed(problem[part]))}
    )
    data = {**data, "problem": problem}
    try:
        data["actions"] = [f"plan {problem_from(problem).digest}", *data["actions"][1:]]
    except Exception:  # noqa: BLE001  (it is no problem, and so has no digest)
        return data
    return data


def read_plan(data: Any) -> str:
    import numpy as np

    import graphrun
    from graphrun.report.plan_files import read_solution

    path = beside_graphs() / f"{os.getpid()}.json"
    path.write_text(json.dumps(data))
    solution, _ = read_solution(path)
    graph, _, picture = base_plan()
    try:
        trace = graphrun.run(solution, graph, SMALL)
    except GraphrunError as error:
        return f"refused by the run: {type(error).__name__}"
    assert np.array_equal(np.asarray(trace.outputs["image"]), np.asarray(picture)), (
        "another picture"
    )
    assert not trace.overruns, "a cap was exceeded"
    return "the right picture"


def _tensors(*shapes: tuple[str, list[int], int]) -> dict[str, Any]:
    end, tensors = 0, dict[str, Any]()
    for name, shape, width in shapes:
        size = width * functools.reduce(int.__mul__, shape, 1)
        tensors[name] = {
            "dtype": {4: "F32", 2: "BF16"}[width],
            "shape": shape,
            "data_offsets": [end, end + size],
        }
        end += size
    return tensors


WEIGHTS = _tensors(("a", [2, 3], 4), ("b", [4], 2), ("c.weight", [2, 2, 2], 2))
LORA = _tensors(
    ("p.to_q.lora_A.weight", [2, 6], 4),
    ("p.to_q.lora_B.weight", [4, 2], 4),
    ("p.to_q.alpha", [], 4),
)


@st.composite
def headers(draw: st.DrawFn, base: dict[str, Any]) -> bytes:
    header = json.dumps(draw(changed(base))).encode()
    size = draw(st.sampled_from((0, 0, 0, 0, -1, 1, 8))) + max(
        item["data_offsets"][1] for item in base.values() if "dtype" in item
    )
    whole = struct.pack("<Q", len(header)) + header + bytes(size)
    return draw(st.one_of(st.just(whole), with_bytes_changed(whole)))


def read_weights(data: bytes) -> str:
    import torch

    from graphrun.modules.source_files import stored_tensors
    from graphrun.modules.sources import FileSource

    path = beside_graphs() / f"{os.getpid()}.safetensors"
    path.write_bytes(data)
    tensors = stored_tensors(path, "fuzz")
    source = FileSource({tensor.name: tensor for tensor in tensors})
    for tensor in tensors:
        if tensor.dtype in ("float32", "bfloat16"):
            source.read_into(tensor.name, torch.empty(tensor.shape, dtype=torch.float32))
    source.close()
    return "accepted"


@functools.cache
def _layer() -> Any:
    import torch

    layer = torch.nn.Module()
    layer.to_q = torch.nn.Linear(6, 4)
    return layer


def loras() -> st.SearchStrategy[bytes]:
    settings = st.sampled_from(
        (
            '{"p.lora_alpha": 8}',
            "[]",
            "x",
            '{"p.lora_alpha": null}',
            '{"p.lora_alpha": 1e999}',
            "[" * 5_000,
        )
    )
    metadata = st.one_of(st.none(), settings.map(lambda text: {"lora_adapter_metadata": text}))
    return metadata.flatmap(
        lambda metadata: headers(LORA if metadata is None else {**LORA, "__metadata__": metadata})
    )


def read_lora(data: bytes) -> str:
    from graphrun.graph.parts import Adapter, Component
    from graphrun.modules.lora import deltas_of

    path = beside_graphs() / f"{os.getpid()}.lora.safetensors"
    path.write_bytes(data)
    part = Component(
        "p", "x.Layer", None, {}, True, "float32", ("float32",), loras=(Adapter(str(path), 1.0),)
    )
    for name, deltas in deltas_of(part, _layer()).items():
        for delta in deltas:
            delta.add_to(_layer().get_parameter(name).detach().clone())
    return "accepted"


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    small = st.integers(0, 12)
    big = st.sampled_from((0, 1, 2, 31, 32, 33, 2**20, 2**31, 2**32 - 1))
    huge = st.sampled_from((0, 1, 2, 32, 2**20, 2**31, 2**60, 2**63, 2**64 - 1))
    keys, tensors = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    body = b""
    for _ in range(keys):
        body += _text(draw(st.sampled_from((b"general.alignment", b"k", b"\xff"))))
        kind = draw(st.one_of(small, big))
        body += struct.pack("<I", kind)
        body += {8: _text(b"x"), 9: struct.pack("<IQ", draw(small), draw(huge))}.get(
            kind, struct.pack("<Q", draw(huge))
        )
        body = body[: len(body) - draw(st.sampled_from((0, 0, 4, 6, 7)))]
    for _ in range(tensors):
        dimensions = draw(st.integers(0, 5))
        body += _text(draw(st.sampled_from((b"a", b"b", b"c")))) + struct.pack("<I", dimensions)
        body += b"".join(
            struct.pack("<Q", draw(st.one_of(st.sampled_from((32, 64, 256)), huge)))
            for _ in range(dimensions)
        )
        body += struct.pack(
            "<IQ",
            draw(st.sampled_from((0, 1, 2, 8, 12, 30, 99))),
            draw(st.sampled_from((0, 32, 7, 2**63))),
        )
    whole = (
        b"GGUF"
        + struct.pack("<IQQ", draw(st.sampled_from((3, 2, 1))), tensors, keys)
        + body
        + bytes(4096)
    )
    return draw(st.one_of(st.just(whole), with_bytes_changed(whole)))


def read_gguf(data: bytes) -> str:
    from graphrun.modules.gguf import gguf_tensors

    path = beside_graphs() / f"{os.getpid()}.gguf"
    path.write_bytes(data)
    gguf_tensors(path, "fuzz")
    return "accepted"


@st.composite
def tokenizers(draw: st.DrawFn) -> Any:
    """Mutants of the byte tokenizer with each kind of normalizer, over its own vocabulary or a
    mutant of three pieces."""
    whole = json.loads((GRAPHS / "tokenizers/bytes.json").read_text())
    pattern = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    bert = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABhYgA="}
    prefix = {"type": "Prepend", "prepend": "_"}
    parts = draw(st.lists(st.sampled_from([pattern, prefix, bert, charsmap]), max_size=2))
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["a", 0.0], ["b", -1.0]],
        "byte_fallback": False,
    }
    model = draw(st.one_of(st.just(whole.pop("model")), changed(unigram)))
    return {
        **draw(changed({**whole, "normalizer": {"type": "Sequence", "normalizers": parts}})),
        "model": model,
    }


def read_tokenizer(data: Any) -> str:
    from graphrun.graph.parts import Part
    from graphrun.modules.build import build_part

    path = beside_graphs() / f"{os.getpid()}.tokenizer.json"
    path.write_text(json.dumps(data))
    config = {"model_max_length": 16, "pad_token": "<pad>"}
    part = Part(
        "tokenizer", "transformers.PreTrainedTokenizerFast", config, True, path, file_line="fuzz"
    )
    tokenizer = build_part(part, _graph())
    tokenizer("a lighthouse at dusk", padding="max_length", truncation=True, max_length=16)
    tokenizer.tokenize("a lighthouse")
    return "accepted"


@st.composite
def configured(draw: st.DrawFn, kind: str) -> Any:
    """(graph, name, mutant of its configuration) of a scheduler or a component."""
    name = draw(st.sampled_from(BASES))
    graph = loaded(name)
    bases = {
        key: part.config
        for key, part in getattr(graph, kind).items()
        if getattr(part, "file", None) is None
    }
    key = draw(st.sampled_from(sorted(bases)))
    config = draw(changed(bases[key]))
    return name, key, config


def read_scheduler(example: tuple[str, str, Any]) -> str:
    from graphrun.modules.build import build_part

    name, key, config = example
    build_part(replace(loaded(name).parts[key], config=config), loaded(name))
    return "accepted"


def read_component(example: tuple[str, str, Any]) -> str:
    from graphrun.modules.build import meta_module

    name, key, config = example
    meta_module(replace(loaded(name).components[key], config=config), loaded(name).trust)
    return "accepted"


@st.composite
def prompts(draw: st.DrawFn) -> tuple[str, bytes]:
    names = st.sampled_from(("prompt", "seed", "height", "steps", "guidance_scale", "nothing", ""))
    lines = draw(
        st.lists(st.one_of(st.dictionaries(names, values, max_size=4), values), max_size=4)
    )
    if draw(st.booleans()):
        rows = [
            draw(st.lists(names, max_size=4)),
            *([str(value) for value in line] for line in lines if isinstance(line, list | dict)),
        ]
        return "csv", draw(
            with_bytes_changed(
                "\n".join(",".join(row) for row in rows).encode(errors="surrogatepass")
            )
        )
    text = "\n".join(json.dumps(line) for line in lines).encode()
    return "jsonl", draw(st.one_of(st.just(text), with_bytes_changed(text)))


def read_prompts(file: tuple[str, bytes]) -> str:
    from graphrun.batch.requests import read_requests, resolved
    from graphrun.graph.settings import settings_of

    path = beside_graphs() / f"{os.getpid()}.{file[0]}"
    path.write_bytes(file[1])
    graph = _graph()
    requests = resolved(read_requests(path), graph, {"prompt": "a"})
    for request in requests:
        if not request.error:
            settings_of(graph, request.inputs)
            str(request.inputs).encode()
    return "accepted" if not all(request.error for request in requests) else "all lines refused"


@functools.cache
def loaded(name: str) -> Any:
    import graphrun

    return graphrun.load(GRAPHS / f"{name}.yaml")


def _graph() -> Any:
    return loaded("flux-tiny")


Reader = tuple[st.SearchStrategy[Any], Callable[[Any], str]]
READERS: Mapping[str, Reader] = {
    "graphs": (graphs(), read_graph),
    "plans": (st.deferred(plans), read_plan),
    "weights": (headers(WEIGHTS), read_weights),
    "loras": (loras(), read_lora),
    "gguf": (gguf_files(), read_gguf),
    "tokenizers": (tokenizers(), read_tokenizer),
    "schedulers": (configured("parts"), read_scheduler),
    "components": (configured("components"), read_component),
    "prompts": (prompts(), read_prompts),
}


@contextmanager
def bounded() -> Iterator[None]:
    """Fails after `SECONDS` of this process or ten times as many on the clock (other processes may
    have the cores), and where this process has needed 1 GiB more than it ever did."""

    def ended(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"took more than {SECONDS} s")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, 10 * SECONDS),
    )
    handlers, start = (
        [signal.signal(number, ended) for number, _, _ in timers],
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, handlers, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
    growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024
    assert growth_bytes < GIB, f"took {growth_bytes} bytes"


def outcome(reader: str, example: Any) -> tuple[str, float]:
    """What became of ``example``, and the seconds of this process. Raises whatever is no
    GraphrunError, and AssertionError."""
    start = time.process_time()
    with bounded():
        try:
            result = READERS[reader][1](example)
        except BrokenPlan:
            raise
        except GraphrunError as error:
            str(error).encode(errors="surrogateescape")
            result = f"refused: {type(error).__name__}"
    return result, time.process_time() - start
