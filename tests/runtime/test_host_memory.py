"""Host memory as a card sees it: the host waits for copies of pageable memory, and page-locking
takes seconds. Plans know both."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from mmap import PAGESIZE
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from small_component import (
    GROUPS,
    WIDE,
    Small,
    device_of,
    in_layers,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    use,
)
from stored_component import host_of, in_backing_store, saved

from graphrun.errors import GraphrunError, InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Adapter
from graphrun.model.hardware import Hardware
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    BlockGroup,
    ComponentNumbers,
    Problem,
    Use,
    Variant,
)
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import build
from graphrun.modules.compiled import is_compiled
from graphrun.runtime.host import Host
from graphrun.runtime.spool import PREFIX, Spool
from graphrun.trace import Trace
from graphrun.units import round_up
from graphrun.verify.simulate import simulate

ON = replace(small_hardware(), disk_bytes_per_second=4e8, pageable_bytes_per_second=5e8)

# a streams all but two of its blocks.
STREAMED = """
    slot s0/0:a load
      read a
      load a unblocked[0] from {backing_store}
    slot s0/0:a first
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load a wide[1] thin[2] from {backing_store}
      run
    slot s0/0:a steady x3
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      run
    slot end
      drop a
      evict a unblocked[0] wide[1] thin[2]
"""

# a computes with resident weights while b is copied.
BESIDE_RESIDENT = """
    slot s0/0:a load
      read a
      load a all from {backing_store}
    slot s0/0:a first
      read b
      run
    slot s0/0:a steady x3
      load b all from {backing_store}
      run
    slot s1/0:b load
      evict a all
    slot s1/0:b first
      run
    slot end
      drop a
      drop b
      evict b all
"""


class Case:
    """Components whose weights lie in files, and the plan ``text`` for them."""

    def __init__(
        self, folder: Path, text: str, backing_store: str, calls: list[str], hardware: Hardware
    ) -> None:
        names = sorted(set(calls))
        problem = small_problem(
            {}, [[use(name, calls.count(name), hardware)] for name in names], hardware
        )
        self.problem = replace(
            problem,
            components=tuple(in_backing_store(backing_store, name, hardware) for name in names),
        )
        self.plan = plan_of(
            self.problem, text.format(backing_store=backing_store, ring_buffer=2 * WIDE)
        )
        self.folders = {name: saved(folder / name, seed) for seed, name in enumerate(names)}
        self.calls, self.simulation = calls, simulate(self.problem, self.plan)

    def run(self, device: Any) -> Trace:
        trace = run(
            self.problem, self.plan, host_of(self.problem, self.folders, device), device, self.calls
        )
        expected = plain({name: Small(seed) for seed, name in enumerate(self.folders)}, self.calls)
        assert torch.equal(trace.outputs["x"], expected)
        return trace

    def as_planned(self, trace: Trace) -> None:
        for actual, expected in zip(trace.slots, self.simulation.slots, strict=True):
            assert actual.end_seconds - actual.start_seconds == pytest.approx(
                expected.seconds, rel=0.03
            )


@pytest.mark.parametrize("flops", [1e9, 5e9], ids=["compute-bound", "even"])
@pytest.mark.parametrize("blocks", [1, 2, 5, 0])
def test_the_host_waits_for_copies_from_pageable_memory_when_no_compute_is_left_to_queue(
    tmp_path: Path, blocks: int, flops: float
) -> None:
    """Otherwise it would queue no compute meanwhile, and the run would take the sum of both.
    ``blocks`` of the ring buffer, if any."""
    text = STREAMED.replace("{ring_buffer}", str(blocks * WIDE)) if blocks else BESIDE_RESIDENT
    calls = ["a"] * 4 + ["b"] * (not blocks)
    case = Case(tmp_path, text, "pageable", calls, replace(ON, flops_per_second=flops))
    case.as_planned(case.run(device_of(case.problem)))


def test_page_locking_goes_on_beside_reads_and_takes_the_planned_seconds(tmp_path: Path) -> None:
    """Of twice the seconds of all reads: the copies wait for it."""
    hardware = replace(ON, page_lock_seconds=2 / ON.disk_bytes_per_second, flops_per_second=1e9)
    case = Case(tmp_path, BESIDE_RESIDENT, "pinned", ["a"] * 4 + ["b"], hardware)
    case.as_planned(case.run(device_of(case.problem)))
    read_seconds = sum(
        case.problem.components[0].variants[0].read_seconds[k] * n for k, n in enumerate((1, 4, 6))
    )
    assert case.simulation.slots[0].seconds == pytest.approx(2 * read_seconds, rel=0.5)
    assert case.simulation.slots[0].seconds > 2 * read_seconds
    assert case.simulation.slots[1].seconds == pytest.approx(
        case.simulation.slots[1].compute_seconds
    ), "hidden behind compute"


@pytest.mark.parametrize("backing_store", ["pinned", "pageable"])
def test_the_weights_of_a_module_passed_in_are_page_locked_if_the_plan_says_so(
    backing_store: str,
) -> None:
    problem = small_problem({}, [[use("a", 1, ON)]], ON)
    component = in_backing_store(backing_store, "a", ON)
    device = device_of(problem := replace(problem, components=(component,)))
    host = Host({"a": Small()}, problem, device)
    arena_bytes = device.arenas.nbytes("arenas")
    assert arena_bytes == host.residencies["a"].backing_store.nbytes > 0
    assert device.arenas.nbytes("pinned") == (arena_bytes if backing_store == "pinned" else 0)


@pytest.mark.parametrize("nbytes", [1, PAGESIZE, PAGESIZE + 1])
def test_host_memory_that_can_be_page_locked_is_on_pages_of_its_own(nbytes: int) -> None:
    device = device_of(small_problem({}, []))
    arenas = [device.arena(nbytes) for _ in range(3)]
    assert device.arenas.nbytes("arenas") == 3 * nbytes
    for arena in arenas:
        assert (arena.numel(), arena.data_ptr() % PAGESIZE) == (nbytes, 0)
        end = arena.storage_offset() + round_up(nbytes, PAGESIZE)
        assert end <= arena.untyped_storage().nbytes()


def test_host_memory_counts_until_its_storage_is_freed_and_not_in_a_forked_process() -> None:
    arenas = device_of(small_problem({}, [])).arenas
    memory = torch.zeros(100, dtype=torch.float32)
    arenas.count("arenas", memory)
    part = memory[:10]

    def child() -> None:
        arenas.count("arenas", torch.zeros(10))
        os._exit(arenas.nbytes("arenas"))

    process = get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    del memory
    assert arenas.nbytes("arenas") == 400, "a view keeps the storage"
    del part
    assert (arenas.nbytes("arenas"), arenas.peak_bytes("arenas")) == (0, 400)
    arenas.reset_peaks()
    assert arenas.peak_bytes("arenas") == 0


@pytest.mark.parametrize("backing_store", ["pinned", "pageable"])
def test_memory_is_page_locked_by_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backing_store: str
) -> None:
    case = Case(tmp_path, BESIDE_RESIDENT, backing_store, ["a"] * 4 + ["b"], ON)
    device, lockers, used_queues = device_of(case.problem), list[str](), set[str]()
    pin = device.pin

    def background(job: Callable[[], None], queue: str = "disk") -> Callable[[], None]:
        used_queues.add(queue)
        return queues[queue].submit(job).result

    with ThreadPoolExecutor(1, "disk") as disk, ThreadPoolExecutor(1, "lock") as lock:
        queues = {"disk": disk, "lock": lock}
        monkeypatch.setattr(device, "background", background)
        monkeypatch.setattr(
            device,
            "pin",
            lambda arena: (lockers.append(threading.current_thread().name), pin(arena)),
        )
        case.run(device)
    is_pinned = backing_store == "pinned"
    assert lockers == ["lock_0"] * 2 * is_pinned
    assert used_queues == ({"disk", "lock"} if is_pinned else {"disk"})


class Joined:
    """Page-locks memory no earlier than somebody waits for it; ``pending`` are the jobs that nobody
    waited for yet."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending, self._background = list[Callable[[], None]](), device.background
        monkeypatch.setattr(device, "background", self.background)

    def background(self, job: Callable[[], None], queue: str = "disk") -> Callable[[], None]:
        if queue != "lock":
            return cast(Callable[[], None], self._background(job, queue))
        self.pending.append(job)

        def join() -> None:
            if job in self.pending:
                self.pending.remove(job)
                job()

        return join


@pytest.mark.parametrize("text", [STREAMED, BESIDE_RESIDENT], ids=["streamed", "resident"])
def test_copies_wait_for_page_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    case = Case(tmp_path, text, "pinned", ["a"] * 4 + ["b"] * (text is BESIDE_RESIDENT), ON)
    device = device_of(case.problem)
    locks = Joined(device, monkeypatch)
    case.run(device)
    assert not locks.pending


def test_memory_is_not_freed_while_it_is_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads fail, so that nothing is copied."""
    case = Case(tmp_path, BESIDE_RESIDENT, "pinned", ["a"] * 4 + ["b"], ON)
    device = device_of(case.problem)
    locks = Joined(device, monkeypatch)
    host = host_of(case.problem, case.folders, device)
    for file in case.folders["a"].iterdir():
        file.unlink()
    with pytest.raises(GraphrunError):
        run(case.problem, case.plan, host, device, case.calls)
    assert not locks.pending


def test_a_host_is_restricted_to_components_that_it_has() -> None:
    modules = {"a": Small(), "b": Small(1)}
    problem = small_problem(modules, [[use(name, 1, ON)] for name in modules], ON)
    host = Host(modules, problem, device_of(problem))
    assert host.restricted_to(problem).residencies == host.residencies
    part = replace(problem, components=problem.components[:1])
    restricted_host = host.restricted_to(part)
    assert restricted_host.residencies == {"a": host.residencies["a"]}
    with pytest.raises(InputError, match="built for other blocks"):
        restricted_host.restricted_to(problem)


def has_values_of(expected: Small, module: torch.nn.Module) -> bool:
    values = module.state_dict()
    return all(
        torch.equal(values[name].cpu(), tensor) for name, tensor in expected.state_dict().items()
    )


def test_stores_that_the_plan_does_not_read_are_filled_before_the_run(tmp_path: Path) -> None:
    problem = small_problem({}, [[use("a", 1, ON)], [use("b", 1, ON)]], ON)
    filled_numbers = in_backing_store("pinned", "a", ON, read_seconds=())
    problem = replace(problem, components=(filled_numbers, in_backing_store("pinned", "b", ON)))
    device = device_of(problem)
    folders = {name: saved(tmp_path / name) for name in ("a", "b")}
    host = host_of(problem, folders, device)

    def filled() -> list[str]:
        stores = {name: residency.backing_store for name, residency in host.residencies.items()}
        return [name for name, store in stores.items() if store.memory is not None]

    assert filled() == ["a"]
    assert has_values_of(Small(), host.modules["a"])
    host.residencies["b"].prepare_reads()
    host.residencies["b"].backing_store.finish_reads()
    assert filled() == ["a", "b"]
    host.finish()
    assert filled() == ["a"], "the plan reads b, and has dropped it"
    host.close()
    assert filled() == []
    assert device.arenas.nbytes("arenas") == 0
    host.prepare(["b"])
    assert filled() == []
    host.prepare()
    assert filled() == ["a"]


def test_modules_that_are_passed_in_keep_their_weights() -> None:
    problem = small_problem({}, [[use("a", 1, ON)]], ON)
    problem = replace(problem, components=(in_backing_store("pinned", "a", ON),))
    module = Small()
    host = Host({"a": module}, problem, device_of(problem))
    host.finish()
    host.close()
    assert host.residencies["a"].holds_module()
    assert has_values_of(Small(), module)


def problem_in(backing_store: str) -> Problem:
    problem = small_problem({}, [[use("a", 1, ON)]], ON)
    return replace(problem, components=(in_backing_store(backing_store, "a", ON),))


@pytest.mark.parametrize(
    ("backing_store", "is_dropped"), [("pinned", False), ("pinned", True), ("disk", False)]
)
def test_weights_stay_the_same_when_a_component_is_split_into_layers(
    tmp_path: Path, backing_store: str, is_dropped: bool
) -> None:
    problem = problem_in(backing_store)
    (component,) = problem.components
    device = device_of(problem)
    host = host_of(problem, {"a": saved(tmp_path)}, device)
    for numbers in (component, in_layers(component), component):
        host.match_layout(replace(problem, components=(numbers,)))
        residency = host.residencies["a"]
        assert residency.granularity == numbers.granularity
        residency.prepare_reads()
        with device.capped(1 << 30):
            paths = [path for group in numbers.groups for path in group.blocks]
            for act in (residency.allocate, residency.load):
                for path in paths:
                    act(path)
                device.barrier()
            assert residency.loaded_bytes() > 0
            assert has_values_of(Small(), residency.module)
            residency.release()
        if is_dropped:
            residency.drop()
    assert device.arenas.nbytes("arenas") <= component.variants[0].host_bytes, "of one layout"


def in_other_variant(component: ComponentNumbers) -> ComponentNumbers:
    return replace(component, variants=(replace(component.variants[0], backing_store="pageable"),))


def on_device(device: str, component: ComponentNumbers) -> ComponentNumbers:
    return replace(component, variants=(replace(component.variants[0], device=device),))


def in_larger_blocks(component: ComponentNumbers) -> ComponentNumbers:
    variant = component.variants[0]
    block_bytes = tuple(nbytes + ALLOCATION_BYTES for nbytes in variant.block_bytes)
    return replace(component, variants=(replace(variant, block_bytes=block_bytes),))


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ([], "of another graph"),
        ([in_layers], "of another graph"),
        ([in_other_variant], "0"),
        ([in_layers, in_other_variant], "0"),
        ([partial(on_device, "cpu")], "0"),
        ([in_larger_blocks], "0"),
    ],
    ids=["graph", "graph and layers", "variant", "layers and variant", "CPU", "bytes of blocks"],
)
def test_host_memory_is_of_one_graph_and_its_variants_and_blocks(
    tmp_path: Path, changes: list[Callable[[ComponentNumbers], ComponentNumbers]], digest: str
) -> None:
    problem = problem_in("pinned")
    host = host_of(problem, {"a": saved(tmp_path)}, device_of(problem))
    assert host.fits(problem)
    (component,) = problem.components
    for change in changes:
        component = change(component)
    other_problem = replace(problem, components=(component,), graph_digest=digest)
    assert not host.fits(other_problem)
    with pytest.raises(InputError, match="built for another graph or other blocks"):
        host.match_layout(other_problem)


def test_host_memory_is_for_any_device_that_weights_are_copied_to() -> None:
    problem = problem_in("pinned")
    host = Host({"a": Small()}, problem, device_of(problem))
    component = on_device("device1", problem.components[0])
    assert host.fits(replace(problem, components=(component,)))


FLUX = load(Path(__file__).parents[2] / "graphs/flux-tiny.yaml")


def with_encoder(**changes: Any) -> Graph:
    """The graph with ``changes`` of its first text encoder."""
    component = replace(FLUX.component("text_encoder"), **changes)
    return replace(FLUX, components={**FLUX.components, "text_encoder": component})


def host_of_encoder(
    graph: Graph = FLUX,
    modules: Mapping[str, torch.nn.Module] | None = None,
    precision: str = "bfloat16",
    blocks: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    spool: Spool | None = None,
) -> Host:
    """The host of ``graph`` for a plan that calls one text encoder, which may stream ``blocks``.
    ``spool``: writes its weights to a file."""
    component = replace(graph.component("text_encoder"), dtype="float32")  # bytes for any precision
    groups = (*GROUPS[:1], BlockGroup("layers", blocks, True))
    layouts = lay_out(build(component, graph), blocks)
    sizes = tuple(
        max(round_up(layouts[path].nbytes, ALLOCATION_BYTES) for path in group.blocks or ("",))
        for group in groups
    )
    variant = Variant(precision, "pinned", "device", sizes, (0.0, 0.0), sum(sizes))
    variant = replace(variant, stored_bytes=sum(sizes) if spool else 0)
    numbers = ComponentNumbers("text_encoder", 0, groups, (variant,))
    problem = small_problem({}, [[Use("text_encoder", 1, (1, 1), (1.0, 1.0))]], ON)
    problem = replace(problem, components=(numbers,), allow=allow)
    return Host.of_graph(graph, problem, device_of(problem), modules, spool)


@pytest.fixture(scope="module")
def flux_modules() -> dict[str, Any]:
    return {name: build(component, FLUX) for name, component in FLUX.components.items()}


def test_a_host_of_a_graph_has_the_weights_of_components_that_no_call_enters(
    flux_modules: dict[str, Any],
) -> None:
    transformer = flux_modules["transformer"]
    for modules in ({}, {"transformer": transformer}):
        host = host_of_encoder(modules=modules)
        assert host.residencies.keys() == {"text_encoder"}
        assert host.loaded_bytes == 0
        assert host.casts == {}
        assert host.sources == (), "weights are random"
        weight = host.tensor("transformer", "x_embedder.weight")
        assert torch.equal(weight, transformer.x_embedder.weight)
        expected = flux_modules["text_encoder"].state_dict()
        for name, tensor in host.modules["text_encoder"].state_dict().items():
            assert host.tensor("text_encoder", name).data_ptr() == tensor.data_ptr()
            assert torch.equal(tensor, expected[name])
        assert host.parts.keys() == FLUX.parts.keys()
        host.close()
        assert host.tensor("text_encoder", name).is_meta, "its store is dropped"


def test_a_host_of_a_graph_knows_which_components_the_plan_casts() -> None:
    host = host_of_encoder(precision="float32")
    assert host.casts == {"text_encoder": (torch.bfloat16, torch.float32)}
    host.close()


def test_a_host_of_a_graph_names_the_files_that_weights_are_read_from(
    tmp_path: Path, flux_modules: dict[str, Any]
) -> None:
    save_file(flux_modules["text_encoder"].state_dict(), tmp_path / "model.safetensors")
    host = host_of_encoder(with_encoder(source=str(tmp_path)))
    (source,) = host.sources
    assert (source["component"], source["source"]) == ("text_encoder", str(tmp_path))
    assert [file["name"] for file in source["files"]] == ["model.safetensors"]
    host.close()


def test_a_host_of_a_graph_warns_of_layers_that_the_cpu_dequantizes_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    config = {**FLUX.component("text_encoder").config, "hidden_size": 96}
    with pytest.warns(RuntimeWarning, match=r"text_encoder\..* has rows of 96 elements in nf4"):
        host_of_encoder(with_encoder(config=config), precision="nf4").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host_of_encoder(precision="nf4").close()


def lora_for(encoder: torch.nn.Module, folder: Path) -> Adapter:
    name = next(name for name, _ in encoder.named_parameters() if name.endswith("q_proj.weight"))
    width, rank = encoder.get_parameter(name).shape[0], 2
    key = name.removesuffix(".weight")
    factors = {f"{key}.lora_A.weight": torch.ones(rank, width)}
    factors[f"{key}.lora_B.weight"] = torch.ones(width, rank)
    save_file(factors, folder / "lora.safetensors")
    return Adapter(str(folder / "lora.safetensors"))


@pytest.mark.parametrize(("precision", "kept_files"), [("bfloat16", 0), ("fp8", 1)])
def test_only_quantized_weights_are_kept_for_later_runs(
    tmp_path: Path, flux_modules: dict[str, Any], precision: str, kept_files: int
) -> None:
    """Weights with a LoRA are written to a temporary file."""
    encoder, spool = flux_modules["text_encoder"], Spool(tmp_path, tmp_path / "kept")
    (tmp_path / "weights").mkdir()
    save_file(encoder.state_dict(), tmp_path / "weights/model.safetensors")
    loras = () if kept_files else (lora_for(encoder, tmp_path),)
    graph = with_encoder(source=str(tmp_path / "weights"), loras=loras)
    host = host_of_encoder(graph, precision=precision, spool=spool)
    assert len(spool.files) == kept_files
    assert len(list(tmp_path.glob(f"{PREFIX}*/*.safetensors"))) == 1 - kept_files
    host.close()


@pytest.mark.parametrize(
    ("setting", "allow"), [("blocks", ("compile",)), ("blocks", ()), ("", ("compile",))]
)
def test_blocks_are_compiled_if_the_graph_asks_for_it_and_the_plan_allows_it(
    setting: str, allow: tuple[str, ...]
) -> None:
    blocks = ("encoder.layers.0", "encoder.layers.1")
    host = host_of_encoder(with_encoder(compile=setting), blocks=blocks, allow=allow)
    modules = host.modules["text_encoder"].named_modules()
    compiled_paths = tuple(path for path, module in modules if is_compiled(module))
    assert compiled_paths == (blocks if setting and allow else ()), "each block by itself"
    host.close()


def test_a_lora_cannot_be_fused_into_a_module_that_is_passed_in(
    tmp_path: Path, flux_modules: dict[str, Any]
) -> None:
    encoder = flux_modules["text_encoder"]
    host_of_encoder(modules={"text_encoder": encoder}).close()
    graph = with_encoder(loras=(lora_for(encoder, tmp_path),))
    with pytest.raises(InputError, match="text_encoder was passed in, but the graph fuses a LoRA"):
        host_of_encoder(graph, {"text_encoder": encoder})


def test_processes_need_a_component_that_they_can_divide() -> None:
    with pytest.raises(InputError, match="no component whose sequence can be divided"):
        host_of_encoder(replace(FLUX, processes=2))
