"""Moving a module's tensors to the device and back keeps values, ties, dtypes and identity; there
is one host copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_component import (
    GROUPS,
    ON,
    Small,
    device_of,
    numbers,
    small_hardware,
    small_problem,
    tensors,
)
from stored_component import cpu_hardware, in_backing_store, meta_module_and_writer, saved

from graphrun.errors import InputError
from graphrun.model.blocks import named
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.residency import Residency
from graphrun.units import GIB

PATHS = [path for k in GROUPS for path in k.blocks]


@pytest.fixture
def device() -> SimulatedDevice:
    return device_of(small_problem({"a": Small()}, [], small_hardware()))


def made(device: SimulatedDevice) -> tuple[Small, Residency]:
    module = Small()
    return module, Residency(module, numbers("a", module, small_hardware()), device)


def test_building_the_arena_keeps_every_value_dtype_shape_and_tie(device: SimulatedDevice) -> None:
    module, _ = made(device)
    expected = Small().state_dict()
    assert module.state_dict().keys() == expected.keys()
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    assert torch.equal(module.order, Small().order), "a buffer that is not persistent counts too"
    assert module.head.weight is module.embed.weight
    assert not any(p.requires_grad for p in module.parameters()), "as in `Small`"
    assert all(type(p) is torch.nn.Parameter for p in module.parameters()), "as code may ask"


def test_the_arena_is_the_only_host_copy(device: SimulatedDevice) -> None:
    module, residency = made(device)
    arena = residency.backing_store.memory
    assert arena is not None
    assert all(
        arena.data_ptr() <= t.data_ptr() < arena.data_ptr() + arena.numel() for t in tensors(module)
    )
    assert arena.numel() == sum(residency.nbytes(path) for path in PATHS)


def load_all(residency: Residency, device: SimulatedDevice, paths: Sequence[str] = PATHS) -> None:
    for path in paths:
        residency.allocate(path)
        device.barrier()
        residency.load(path)
    device.barrier()


def test_loaded_blocks_equal_the_host_and_ties_hold_on_the_device(device: SimulatedDevice) -> None:
    module, residency = made(device)
    with device.capped(1 << 30):
        load_all(residency, device)
        assert all(t.device.type == "sim" for t in tensors(module))
        assert module.head.weight is module.embed.weight
        for name, tensor in Small().state_dict().items():
            assert torch.equal(module.state_dict()[name].cpu(), tensor)
        assert all(isinstance(p, torch.nn.Parameter) for p in module.parameters())
        assert device.machine.copies_in == len(PATHS), "one copy per block"
        device.barrier()
        residency.release()
    assert device.allocated_bytes == 0


def test_eviction_puts_the_same_host_tensors_back_and_frees_that_block_alone(
    device: SimulatedDevice,
) -> None:
    module, residency = made(device)
    host = [id(t) for t in tensors(module)]
    with device.capped(1 << 30):
        load_all(residency, device, ("", "wide.1"))
        both_bytes = device.allocated_bytes
        residency.evict("wide.1")
        assert both_bytes - device.allocated_bytes == -(-residency.nbytes("wide.1") // 512) * 512
        assert module.wide[1].expand.weight.device.type == "cpu"
        assert module.embed.weight.device.type == "sim"
        residency.evict("")
        assert device.allocated_bytes == 0
    assert [id(t) for t in tensors(module)] == host


def test_blocks_leave_a_device_when_their_module_is_placed_on_another(
    device: SimulatedDevice,
) -> None:
    module, residency = made(device)
    component = numbers("a", module, small_hardware())
    with torch.device("meta"):
        copy_on_meta = Residency(Small(), component, device, original=residency)
    other_device = device_of(small_problem({"a": Small()}, [], small_hardware()))
    with device.capped(1 << 30):
        residency.allocate("wide.1")
        residency.place(component, device)
        assert device.allocated_bytes > 0, "it is there already"
        copy_on_meta.place(component, other_device)
        assert copy_on_meta.device is other_device
        assert residency.backing_store.device is device, "a copy does not move its original"
        residency.place(component, other_device)
        assert device.allocated_bytes == 0
        assert residency.device is residency.backing_store.device is other_device


def test_only_buffers_that_the_code_replaced_are_bound_again(device: SimulatedDevice) -> None:
    module, residency = made(device)
    with device.capped(1 << 30):
        load_all(residency, device)
        buffers = dict(module.named_buffers())
        residency.rebind()
        assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
        replacement = module.wide[1].gain = buffers["wide.1.gain"] + 1
        residency.rebind()
        assert module.wide[1].gain is not replacement, "it is in the block's memory"
        assert torch.equal(module.wide[1].gain.cpu(), replacement.cpu())
        assert module.wide[2].gain is buffers["wide.2.gain"]
        device.barrier()
        residency.release()


def add_in_place(block: Any) -> None:
    block.gain.add_(1)


def put_another(block: Any) -> None:
    block.gain = block.gain + 1


def put_one_with_a_gradient(block: Any) -> None:
    block.gain = (block.gain + 1).requires_grad_()


@pytest.mark.parametrize("change", [add_in_place, put_another, put_one_with_a_gradient])
@pytest.mark.parametrize("backing_store", ["", "pinned", "disk"])
def test_what_the_code_writes_to_a_buffer_outlives_an_eviction(
    device: SimulatedDevice, tmp_path: Path, backing_store: str, change: Callable[[Any], None]
) -> None:
    """``backing_store``: of weights in files; "": the module brings them."""
    if backing_store:
        module, writer = meta_module_and_writer(saved(tmp_path))
        component = in_backing_store(backing_store, "a", small_hardware())
        residency = Residency(module, component, device, writer)
        residency.prepare_reads()
    else:
        module, residency = made(device)
    expected, other_expected = Small().wide[1].gain + 1, Small().wide[2].gain
    with device.capped(1 << 30):
        load_all(residency, device)
        change(module.wide[1])
        device.barrier()
        residency.release()
        if not backing_store:
            assert torch.equal(module.wide[1].gain, expected)
            assert torch.equal(module.wide[2].gain, other_expected)
        assert not module.wide[1].gain.requires_grad
        load_all(residency, device)
        assert not module.wide[1].gain.requires_grad
        assert module.wide[1].gain.device.type == "sim"
        assert torch.equal(module.wide[1].gain.cpu(), expected)
        assert torch.equal(module.wide[2].gain.cpu(), other_expected)
        residency.release()


def test_what_the_code_writes_to_a_buffer_outlives_the_memory_of_its_block(tmp_path: Path) -> None:
    """On the CPU, where a ring buffer has the memory."""
    device = CpuDevice(cpu_hardware())
    module, writer = meta_module_and_writer(saved(tmp_path))
    residency = Residency(module, in_backing_store("file", "a", ON), device, writer)
    with device.capped(GIB):
        memory = device.allocate(residency.nbytes("wide.1"))
        residency.copy("wide.1", memory)
        device.barrier()
        residency.bind("wide.1", memory)
        assert all(type(p) is torch.nn.Parameter for p in module.wide[1].parameters())
        add_in_place(module.wide[1])
        residency.unbind("wide.1")
        memory.zero_()
        residency.copy("wide.1", memory)
        device.barrier()
        residency.bind("wide.1", memory)
        assert torch.equal(module.wide[1].gain, Small().wide[1].gain + 1)
        residency.unbind("wide.1")
    residency.drop()


@pytest.mark.parametrize("other", [torch.ones(3, dtype=torch.bfloat16), torch.ones(64), None])
def test_a_tensor_of_another_kind_in_the_place_of_a_buffer_is_dropped_with_its_block(
    device: SimulatedDevice, other: torch.Tensor | None
) -> None:
    module, residency = made(device)
    with device.capped(1 << 30):
        load_all(residency, device)
        module.wide[1].gain = other if other is None else other.to(device.torch_device)
        residency.release()
    assert torch.equal(module.wide[1].gain, Small().wide[1].gain)


def test_loaded_blocks_wait_on_the_device_while_another_dtype_is_active(
    device: SimulatedDevice,
) -> None:
    module, residency = made(device)
    with device.capped(1 << 30):
        load_all(residency, device, PATHS[1:])
        residency.deactivate()
        load_all(residency, device, PATHS[:1])
        loaded_bytes, copies = residency.loaded_bytes(), device.machine.copies_in
        assert all(tensor.device.type == "cpu" for tensor in tensors(module))
        residency.activate()
        assert residency.loaded_bytes() == loaded_bytes
        assert all(tensor.device.type == "sim" for tensor in tensors(module))
        assert torch.equal(module.wide[3].expand.weight.cpu(), Small().wide[3].expand.weight)
        assert device.machine.copies_in == copies
        residency.release()


def test_blocks_take_the_planned_bytes_of_their_group(device: SimulatedDevice) -> None:
    module = Small()
    component = numbers("a", module, small_hardware())
    block_bytes = component.variants[0].block_bytes
    larger = replace(component.variants[0], block_bytes=(*block_bytes[:2], block_bytes[2] + 512))
    residency = Residency(module, replace(component, variants=(larger,)), device)
    with device.capped(1 << 30):
        load_all(residency, device, ("wide.1", "thin.2"))
        assert residency.loaded_paths == ("wide.1", "thin.2")
        assert residency.loaded_bytes() == block_bytes[1] + block_bytes[2] + 512
        assert residency.loaded_bytes() == residency.measured_bytes() == device.allocated_bytes
        assert residency.loaded_bytes(device_of(small_problem({}, []))) == 0
        module.wide[1].expand.register_buffer("cache", torch.ones(128, device=device.torch_device))
        assert (
            residency.measured_bytes() == device.allocated_bytes == residency.loaded_bytes() + 512
        )
        residency.release()
        assert residency.loaded_paths == ()


@pytest.mark.parametrize(
    ("weight", "strides"),
    [(torch.randn(64, 64).t(), (1, 64)), (torch.randn(64, 128)[:, ::2], (64, 1))],
    ids=["dense", "with gaps"],
)
def test_a_dense_tensor_keeps_its_strides(
    device: SimulatedDevice, weight: torch.Tensor, strides: tuple[int, int]
) -> None:
    """As in the channels_last format."""
    module = Small()
    module.head.weight = module.embed.weight = torch.nn.Parameter(weight, requires_grad=False)
    residency = Residency(module, numbers("a", module, small_hardware()), device)
    with device.capped(1 << 30):
        load_all(residency, device)
        assert module.embed.weight.stride() == strides
        assert torch.equal(module.embed.weight.cpu(), weight)
        residency.release()
    assert module.embed.weight.stride() == strides


def load_other_values(module: Small) -> None:
    module.load_state_dict(Small(1).state_dict())


def assign_other_tensors(module: Small) -> None:
    module.load_state_dict(Small(1).state_dict(), assign=True)


def cast(module: Small) -> None:
    module.double()


def untie(module: Small) -> None:
    module.head.weight = torch.nn.Parameter(module.head.weight.clone())


def share_an_earlier_tensor(module: Small) -> None:
    module.wide[1].expand.weight.data = module.wide[0].expand.weight.data


def share_a_later_tensor(module: Small) -> None:
    module.wide[0].expand.weight.data = module.wide[1].expand.weight.data


@pytest.mark.parametrize(
    ("change", "still_holds"),
    [
        (load_other_values, True),
        (assign_other_tensors, False),
        (cast, False),
        (untie, False),
        (share_an_earlier_tensor, False),
        (share_a_later_tensor, False),
    ],
)
def test_other_tensors_in_a_module_are_detected(
    device: SimulatedDevice, change: Callable[[Small], None], still_holds: bool
) -> None:
    module, residency = made(device)
    assert residency.holds_module()
    change(module)
    assert residency.holds_module() == still_holds


@pytest.mark.parametrize("rows", [slice(0, 96), slice(96, 192)], ids=["first", "second"])
def test_a_write_to_either_half_of_a_tensors_data_is_detected(
    device: SimulatedDevice, rows: slice
) -> None:
    module, residency = made(device)
    residency.note_contents()
    assert not residency.changed()
    module.wide[2].expand.weight.data[rows] += 1
    assert residency.changed()


def test_a_write_to_any_tensor_is_detected_by_at_most_eight_of_its_words(
    device: SimulatedDevice,
) -> None:
    module, residency = made(device)
    assert not residency.changed(), "nothing is noted"
    residency.note_contents()
    for tensor in tensors(module):
        tensor.data += 1
        assert residency.changed()
        residency.note_contents()
    for tensor in (module.scale, module.thin[3].gain, module.wide[3].expand.bias):
        words, count = tensor.data.view(-1).view(torch.int64), 0
        for number in range(words.numel()):
            words[number] += 1
            count += residency.changed()
            residency.note_contents()
        assert min(words.numel(), 5) <= count <= 8


def test_a_write_through_a_tensor_is_detected_wherever_it_is(device: SimulatedDevice) -> None:
    module, residency = made(device)
    residency.note_contents()
    for number in range(16):
        module.thin[0].expand.bias[number] += 1
        assert residency.changed()
        residency.note_contents()


def test_a_module_that_was_not_planned_for_is_refused(device: SimulatedDevice) -> None:
    module = Small()
    component = numbers("a", module, small_hardware())
    module.wide[2].expand = torch.nn.Linear(64, 500)
    with pytest.raises(InputError, match=r"a: block 'wide.2' has \d+ bytes"):
        Residency(module, component, device)


def test_a_module_that_is_not_on_the_cpu_is_refused(device: SimulatedDevice) -> None:
    module = Small().to("meta")
    with pytest.raises(InputError, match="on meta; pass it in on the CPU"):
        Residency(module, numbers("a", module, small_hardware()), device)


@pytest.mark.parametrize("backing_store", ["disk", "file"])
def test_a_module_with_weights_is_not_read_from_files(
    device: SimulatedDevice, backing_store: str
) -> None:
    component = in_backing_store(backing_store, "a", small_hardware())
    with pytest.raises(InputError, match="a was passed in, but the plan reads it from"):
        Residency(Small(), component, device)


def test_each_tensor_of_a_layer_is_read_by_its_name(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    module, writer = meta_module_and_writer(saved(tmp_path))
    layer, expected = module.wide[1].expand, Small().wide[1].expand
    layer._parameters = dict(reversed(layer._parameters.items()))  # the bias comes first
    component = in_backing_store("disk", "a", small_hardware())
    residency = Residency(module, component, device, writer)
    for key, tensor in layer._parameters.items():
        values = residency.read(f"wide.1.expand.{key}", tensor)
        assert torch.equal(values, expected.get_parameter(key))
    other_tensor = torch.ones(1)
    assert residency.read("wide.1.expand.other", other_tensor) is other_tensor


def test_blocks_are_compiled_alone(device: SimulatedDevice) -> None:
    module = Small()
    component = numbers("a", module, small_hardware())
    module.wide[1].compile()
    Residency(module, component, device)
    module.thin.compile()
    with pytest.raises(InputError, match="a: thin.0 is moved by itself, but is a part of what is"):
        Residency(module, component, device)


def test_blocks_are_named_in_call_order() -> None:
    component = numbers("a", Small(), small_hardware())
    assert named(component, None).paths == PATHS
    blocks = named(component, (("thin", (0, 5)), ("unblocked", (0,))))
    assert blocks.paths == ["", "thin.0", "thin.5"]
    assert blocks.counts[0] == 1
    assert blocks.names == (("unblocked", (0,)), ("thin", (0, 5)))
    assert named(component, ()).paths == []
