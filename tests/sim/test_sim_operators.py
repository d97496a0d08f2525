"""The simulated device as a torch device: creating, mixing, copying and printing tensors as on
CUDA, with the CPU's results."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from graphrun.errors import GraphrunError
from graphrun.sim import Machine, available, device, register


@pytest.fixture(autouse=True)
def sim():
    with Machine() as machine:
        yield machine


def same(operator, *shapes) -> None:
    """``operator`` gives the same numbers, shapes, dtypes and strides on the CPU and on sim."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        inputs = [torch.randn(shape).to(dtype) for shape in shapes]
        expected = operator(*(x.clone() for x in inputs))
        result = operator(*(x.to("sim") for x in inputs))
        for e, f in zip(
            *((r if isinstance(r, (tuple, list)) else (r,)) for r in (expected, result)),
            strict=True,
        ):
            assert f.device == device
            assert (f.dtype, f.shape, f.stride()) == (e.dtype, e.shape, e.stride())
            assert torch.equal(f.cpu(), e)


OPERATORS = {
    "matmul": (lambda a, b: a @ b, (2, 3, 4, 5), (5, 6)),
    "matmul broadcast": (lambda a, b: a @ b, (2, 1, 4, 5), (3, 5, 6)),
    "linear strided": (lambda a, w: functional.linear(a.transpose(1, 2), w), (2, 5, 3), (4, 5)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 3, 4), (2, 5, 4)),
    "attention": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k),
        (1, 2, 5, 8),
        (1, 2, 7, 8),
    ),
    "causal": (
        lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        (1, 2, 5, 8),
    ),
    "attention mask": (
        # a card's memory order: test_attention_has_the_memory_order_and_the_mask_of_a_card
        lambda q, m: functional.scaled_dot_product_attention(q, q, q, attn_mask=m).contiguous(),
        (1, 2, 5, 8),
        (5, 5),
    ),
    "grouped": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        (1, 4, 5, 8),
        (1, 2, 5, 8),
    ),
    "layer_norm": (lambda x, w: functional.layer_norm(x, (8,), w, w), (3, 8), (8,)),
    "group_norm": (lambda x: functional.group_norm(x, 2), (2, 4, 5, 5)),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (8,), w), (3, 8), (8,)),
    "conv": (lambda x, w: functional.conv2d(x, w, padding=1, stride=2), (1, 3, 8, 8), (4, 3, 3, 3)),
    "conv same": (lambda x, w: functional.conv1d(x, w, padding="same"), (1, 3, 8), (4, 3, 3)),
    "interpolate": (
        lambda x: functional.interpolate(x, scale_factor=2.0, mode="nearest"),
        (1, 2, 4, 4),
    ),
    "bilinear": (lambda x: functional.interpolate(x, size=(7, 9), mode="bilinear"), (1, 2, 4, 4)),
    "pad": (lambda x: functional.pad(x, (1, 2), mode="reflect"), (2, 3, 5)),
    "chunk": (lambda x: x.chunk(3, dim=-1), (2, 9)),
    "stack": (lambda x, y: torch.stack([x, y], dim=1), (2, 3), (2, 3)),
    "topk": (lambda x: tuple(x.topk(2)), (3, 5)),
    "index": (lambda x: x[:, [0, 2]][..., None], (2, 5)),
    "mask": (lambda x: x[x > 0], (4, 4)),
    "where": (lambda x: torch.where(x > 0, x, 0.0), (4, 4)),
    "gelu": (lambda x: functional.gelu(x, approximate="tanh"), (3, 8)),
    "channels_last": (lambda x: x.to(memory_format=torch.channels_last), (1, 2, 3, 4)),
    "complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.float().view(3, 4, 2)) * 1j),
        (3, 8),
    ),
    "in place": (lambda x: x.add_(1).unsqueeze_(0).transpose_(1, 2).squeeze_(), (3, 8)),
    "median": (lambda x: x.median(dim=1), (3, 5)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_the_cpus(name):
    same(*OPERATORS[name])


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_the_cpus_in_inference_mode(name):
    with torch.inference_mode():
        same(*OPERATORS[name])


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.arange(2, 11, 3, device=d),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.full((2, 3), 4.5, device=d),
        lambda d: torch.eye(3, dtype=torch.bfloat16, device=d),
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.as_tensor([1.5], device=d),
        lambda d: torch.tril(torch.ones(3, 3, device=d)),
        lambda d: torch.zeros_like(torch.ones(2, dtype=torch.int64), device=d),
        lambda d: torch.ones(3, device=d).new_tensor([1, 2]),
        lambda d: torch.ones(3, device=d).new_full((2,), 3),
        lambda d: torch.empty(2, 3, device=d).zero_(),
        lambda d: torch.randn(5, device=d),
        lambda d: torch.randint(0, 9, (4,), device=d),
        lambda d: torch.randperm(7, device=d),
        lambda d: torch.ones(4, 4, device=d).bernoulli(0.5),
    ],
)
def test_new_tensors(make):
    torch.manual_seed(3)
    expected = make("cpu")
    torch.manual_seed(3)
    result = make("sim")
    assert result.device == device
    assert result.dtype == expected.dtype
    assert torch.equal(result.cpu(), expected)


def test_devices_do_not_mix():
    x, host = torch.ones(2, 2, device="sim"), torch.ones(2, 2)
    message = r"same device, but found at least two devices, sim:0 and cpu! \(op aten::"
    for mix in (
        lambda: x + host,
        lambda: host + x,
        lambda: host @ x,
        lambda: host.add_(x),
        lambda: torch.cat([x, host]),
        lambda: functional.linear(x, host),
        lambda: functional.embedding(torch.tensor([1]), x),
        lambda: functional.scaled_dot_product_attention(x, x, host),
        lambda: host[torch.tensor([0], device="sim")],
        lambda: x.index_put_((torch.tensor([0]),), host[0]),
        lambda: torch.tensor(1.0).add_(x[0, 0]),
        lambda: torch.where(x > 0, x, host),
        lambda: nn.Linear(2, 2)(x),
    ):
        with pytest.raises(RuntimeError, match=message):
            mix()


def test_scalars_and_index_tensors_on_the_host_may_mix_in():
    x = torch.arange(6.0, device="sim").view(2, 3)
    assert (x + torch.tensor(1.0)).device == device
    assert torch.where(x > 2, x, torch.tensor(0.0)).tolist() == [[0, 0, 0], [3, 4, 5]]
    assert x[:, torch.tensor([2, 0])].tolist() == [[2, 0], [5, 3]]
    assert x[torch.tensor([True, False])].tolist() == [[0, 1, 2]]
    x[torch.tensor([1])] = torch.tensor(9.0)
    x[0, 1:] = 7
    assert x.tolist() == [[0, 7, 7], [9, 9, 9]]


def test_generators_of_the_host_are_refused():
    for draw in (
        lambda g: torch.randn(3, generator=g, device="sim"),
        lambda g: torch.ones(3, device="sim").normal_(generator=g),
        lambda g: torch.randperm(3, generator=g, device="sim"),
    ):
        with pytest.raises(
            RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"
        ):
            draw(torch.Generator())


def test_what_python_sees_of_a_tensor():
    x = torch.tensor([[1.5, 2.0]], device="sim")
    assert (x.tolist(), x[0, 0].item(), float(x[0, 1]), bool(x[0, 0] > 1)) == (
        [[1.5, 2.0]],
        1.5,
        2.0,
        True,
    )
    assert f"{x.sum():.2f}" == "3.50"
    assert "1.5" in f"{x}"
    assert "device='sim:0'" in repr(x)
    assert "1.5" in repr(x)
    for convert in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
            convert()
    assert x.numpy(force=True).tolist() == [[1.5, 2.0]]
    assert torch.tensor([x[0, 0], x[0, 1]]).tolist() == [1.5, 2.0]
    assert [row.tolist() for row in x] == [[1.5, 2.0]]


def test_moving_to_where_it_is_gives_the_same_tensor():
    x = torch.ones(2, device="sim")
    assert x.to("sim") is x
    assert x.to("sim:0") is x
    assert x.to(device, torch.float32) is x
    assert x.contiguous() is x


def test_copies_of_tensors_are_copies(sim):
    x = nn.Parameter(torch.ones(2, device="sim"), requires_grad=False)
    y = copy.deepcopy(x)
    y.zero_()
    assert isinstance(y, nn.Parameter)
    assert x.tolist() == [1, 1]
    assert sim.allocated_bytes == 1024
    with pytest.raises(TypeError, match="cpu"):
        copy.copy(x)


def test_modules_can_be_moved_there_and_back(sim):
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval().requires_grad_(False)
    x = torch.randn(4, 3)
    expected = layer(x)
    layer.to("sim")
    assert torch.equal(layer(x.to("sim")).cpu(), expected)
    layer.to("cpu")
    assert sim.allocated_bytes == 0
    assert torch.equal(layer(x), expected)


def test_pinned_memory_is_not_on_the_device():
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(2, device="sim", pin_memory=True)


@pytest.mark.sweep("more")
def test_nothing_of_torch_is_left_changed(sim):
    program = """
import torch
def state():
    future = torch.__future__
    return (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
            torch.get_default_device(), torch.get_default_dtype(),
            future.get_swap_module_params_on_conversion(),
            future.get_overwrite_module_params_on_conversion(), torch.is_grad_enabled(),
            torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__repr__,
            torch.nn.functional.scaled_dot_product_attention)
initial_state = state()
from graphrun.sim import Machine, register
register(); register()
with Machine():
    assert state() == initial_state
    torch.zeros(2, device="sim") + 1
assert state() == initial_state
assert torch.ones(2).is_pinned() is False
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.sweep("more")
def test_registration_is_idempotent_and_says_why_it_cannot_be():
    register()
    assert available()
    program = """
import torch
torch.utils.rename_privateuse1_backend("other")
import graphrun.sim
assert not graphrun.sim.available()
try:
    graphrun.sim.Machine()
except Exception as error:
    print(type(error).__name__, error)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert process.stdout.startswith(GraphrunError.__name__)
    assert "taken by 'other'" in process.stdout


def test_random_states_can_be_forked_once_sim_is_registered() -> None:
    """``torch.random.fork_rng()`` asks every accelerator for its state, `sim` included."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_a_hollow_machine_takes_the_memory_of_large_tensors_and_computes_small_ones(
    sim: Machine,
) -> None:
    counters = []
    for hollow_bytes in (None, 1 << 16):
        sim.hollow_bytes = hollow_bytes
        allocations = sim.allocations
        large, small = torch.ones(1 << 16, device="sim"), torch.ones(4, device="sim")
        half = (large * 0.5 + 0.5).clamp(0, 1)[::2]
        assert (half.shape, half.device.type) == ((1 << 15,), "sim")
        assert (small * 3).tolist() == [3.0] * 4
        counters.append((sim.peak_bytes, sim.allocations - allocations))
        del large, small, half
        sim.reset_peak()
    assert counters[0] == counters[1]


@pytest.mark.parametrize(
    ("is_head_major", "mask", "token_major", "extra_bytes"),
    [
        (True, None, False, 0),
        (False, None, True, 0),
        (True, torch.float32, True, 0),
        (True, torch.bool, True, 4 * 64 * 64),
    ],
)
def test_attention_has_the_memory_order_and_the_mask_of_a_card(
    sim: Machine,
    is_head_major: bool,
    mask: torch.dtype | None,
    token_major: bool,
    extra_bytes: int,
) -> None:
    shape = (1, 2, 64, 16) if is_head_major else (1, 64, 2, 16)
    host_query = torch.randn(shape) if is_head_major else torch.randn(shape).transpose(1, 2)
    host_mask = None if mask is None else torch.ones(1, 1, 64, 64).tril().to(mask)
    query = host_query.to("sim")
    device_mask = None if host_mask is None else host_mask.to("sim")
    sim.reset_peak()
    before_bytes = sim.peak_bytes
    attend = functional.scaled_dot_product_attention
    result = attend(query, query, query, attn_mask=device_mask)
    assert sim.peak_bytes - before_bytes == result.nbytes + extra_bytes
    assert (result.stride(1) < result.stride(2)) == token_major
    assert torch.equal(result.cpu(), attend(*[host_query] * 3, attn_mask=host_mask))


@pytest.mark.parametrize("operator", [lambda x: functional.layer_norm(x, (8,)), torch.softmax])
def test_norms_and_softmax_copy_an_input_that_is_not_contiguous(sim: Machine, operator) -> None:
    options = (-1,) if operator is torch.softmax else ()
    for x, copies in ((torch.ones(64, 8), 0), (torch.ones(8, 64).t(), 1)):
        tensor = x.to("sim")
        sim.reset_peak()
        before_bytes = sim.peak_bytes
        result = operator(tensor, *options)
        small_bytes = 2 * 512 if not options else 0  # means and deviations
        assert sim.peak_bytes - before_bytes == (1 + copies) * result.nbytes + small_bytes


def test_indices_on_the_device_write_to_a_tensor_on_the_host() -> None:
    """As on CUDA, which copies them there; reads by them are refused."""
    host, value = torch.zeros(6), torch.tensor(2.0)
    indices = torch.tensor([1, 4], device="sim")
    host[indices] = 1.0
    host[torch.tensor([True, False, False, False, False, True], device="sim")] = value.to("sim")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        host[indices]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        host[indices] = torch.ones(2, device="sim")
    assert host.tolist() == [2, 1, 0, 0, 1, 2]
