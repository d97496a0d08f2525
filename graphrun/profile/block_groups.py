"""Splits a component into blocks for streaming: finds the block modules, groups equal ones, and
leaves everything else in the remainder.

Works on the module's structure and the order of calls in a trace; byte sizes come from
`graphrun.modules.blocks.lay_out`.

    transformer_blocks.0 .. .18          group "transformer_blocks"          19 equal blocks
    single_transformer_blocks.0 .. .37   group "single_transformer_blocks"   38 equal blocks
    x_embedder, norm_out, ...            group "remainder"                   one block, never
    streamed

Split into layers, for budgets that blocks do not fit: every module that owns tensors and whose
tensors are read only during its own calls is a block.

    transformer_blocks.0.attn.to_q, .attn.to_k, ..   group "transformer_blocks_3"   equal layers of
    one child, in call order scale_shift_table                                group "remainder"
    read by other code: never streamed
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from torch import nn

from graphrun.model.problem import BlockGroup
from graphrun.modules.blocks import lay_out
from graphrun.modules.compiled import is_compiled
from graphrun.profile.recorder import layer_paths, own_tensors
from graphrun.profile.recording import Call

# A group of blocks that holds less than this share of its component is not worth a staging ring
# buffer: it joins the remainder.
MIN_GROUP_SHARE = 1 / 8

# Largest size ratio within one group: T5's first block also holds the table of relative positions.
SIZE_TOLERANCE = 1.1

REMAINDER = BlockGroup("unblocked", ("",), False)


def block_paths(module: nn.Module, routed: Collection[str] = ()) -> list[str]:
    """Paths of the modules of ``module`` that may be streamed as blocks, in creation order.

    A block is an element of a `torch.nn.ModuleList` of at least two modules of one class. All but
    at most one element must have another element of about equal bytes (SD3's last block lacks a
    part; the second half of HunyuanDiT has skip connections). Where the elements contain such lists
    themselves, and these make up most of their bytes (a UNet's attention: ten transformer blocks
    each), the elements of the inner lists are the blocks. Lists in ``routed`` are skipped (see
    `routed_lists`), and those inside compiled modules.
    """
    return [path for path, _ in _nested_blocks(module, "", routed)]


def routed_lists(units: Iterable[str], entered: Collection[str]) -> set[str]:
    """Paths of the module lists of which one call enters some elements and not others.

    Such elements (mixture-of-experts layers) are selected by the data, so they run in no fixed
    order and cannot be streamed. ``units``: candidate blocks; ``entered``: those that the call
    entered.
    """
    lists: dict[str, set[bool]] = defaultdict(set)
    for path in units:
        lists[path.rpartition(".")[0]].add(path in entered)
    return {path for path, found in lists.items() if len(found) == 2}


def _nested_blocks(
    module: nn.Module, prefix: str, routed: Collection[str]
) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in routed or is_compiled(child):
            continue
        if isinstance(child, nn.ModuleList) and _same_structure(child):
            found += [
                unit
                for index, element in enumerate(child)
                for unit in _element_blocks(element, f"{path}.{index}", routed)
            ]
        else:
            found += _nested_blocks(child, f"{path}.", routed)
    return found


def _element_blocks(
    element: nn.Module, path: str, routed: Collection[str]
) -> list[tuple[str, int]]:
    nbytes = _nbytes(element)
    inner = [] if is_compiled(element) else _nested_blocks(element, f"{path}.", routed)
    return inner if 2 * sum(size for _, size in inner) > nbytes else [(path, nbytes)]


def _same_structure(modules: nn.ModuleList) -> bool:
    if any(
        element is None for element in modules
    ):  # CogView4's VAE has a None where it omits attention
        return False
    sizes = sorted(_nbytes(element) for element in modules)
    same = (
        len(modules) >= 2
        and len({_written_class(element) for element in modules}) == 1
        and any(True for _ in modules[0].children())
    )
    unlike = sum(
        sum(a <= SIZE_TOLERANCE * b and b <= SIZE_TOLERANCE * a for b in sizes) == 1 for a in sizes
    )
    return same and sizes[0] > 0 and unlike <= min(1, len(modules) - 2)


def _written_class(module: nn.Module) -> str:
    """The name of the class, equal whether or not the module is compiled. (Classes of compiled
    modules are not intercepted.)"""
    kind = type(getattr(module, "_orig_mod", module))
    return f"{kind.__module__}.{kind.__qualname__}"


def _nbytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def group_blocks(
    module: nn.Module, calls: Sequence[Call], routed: Collection[str] = ()
) -> tuple[BlockGroup, ...]:
    """The block groups of ``module`` in the order in which ``calls``, its distinct calls, entered
    them, the remainder first.

    Blocks that run several times in one call (a video decoder processes the frames one by one)
    cannot be streamed in one order, so they join the remainder.

    Blocks are in one group if they are under the same child of the component and have about equal
    bytes. A child outside of all groups that is read by other calls than the remainder becomes a
    group of one, named after the child (a VAE's encoder where only `decode` is called). So does a
    ``loose`` module: one inside a block that other code reads or calls while the block does not run
    (DiT's last layer calls the first block's timestep embedding). A block whose own tensors are
    loose, or whose modules all are, joins the remainder.
    """
    repeated = {
        path for call in calls for path, times in Counter(call.entered).items() if times > 1
    }
    candidates = set(block_paths(module, routed)) - repeated
    found = [
        path
        for path in dict.fromkeys(path for call in calls for path in call.entered)
        if path in candidates
    ]
    loose = set[str]().union(*(call.loose for call in calls))
    modules = dict(module.named_modules(remove_duplicate=False))
    loose_in = {path: _loose_modules(modules[path], path, loose) if loose else [] for path in found}
    units = [path for path in loose_in if loose_in[path] != [path]]
    sizes = {path: layout.nbytes for path, layout in lay_out(module, units).items()}
    groups: dict[str, list[str]] = {}  # by first block
    for path in units:
        alike = (
            first
            for first in groups
            if first.split(".")[0] == path.split(".")[0]
            and max(sizes[path], sizes[first]) <= SIZE_TOLERANCE * min(sizes[path], sizes[first])
        )
        groups.setdefault(next(alike, path), []).append(path)
    least = MIN_GROUP_SHARE * sum(sizes.values())
    large = [
        group
        for group in groups.values()
        if len(group) >= 2 and sum(sizes[path] for path in group) >= least
    ]
    kept = _split_where_interrupted(units, large)
    separate = _differently_read_children(module, [path for group in kept for path in group], calls)
    taken = {"unblocked", *separate}
    streamed = _streamed(kept, taken)
    loose_paths = [path for group in kept for block in group for path in loose_in[block]]
    single = [
        BlockGroup(_unique_name(path.split(".")[-1], taken), (path,), False) for path in loose_paths
    ]
    return (
        REMAINDER,
        *(BlockGroup(child, (child,), False) for child in separate),
        *single,
        *streamed,
    )


def _loose_modules(module: nn.Module, path: str, loose: Collection[str]) -> list[str]:
    """Paths of the largest modules at ``path`` or below whose tensors are all ``loose``."""
    inside = [name for name, child in module.named_modules(prefix=path) if own_tensors(child)]
    if path in loose or (inside and all(name in loose for name in inside)):
        return [path]
    return [
        found
        for name, child in module.named_children()
        for found in _loose_modules(child, f"{path}.{name}", loose)
    ]


def group_layers(
    module: nn.Module, calls: Sequence[Call], routed: Collection[str] = ()
) -> tuple[BlockGroup, ...]:
    """The layer groups of ``module`` in the order of their first calls, the remainder first; () if
    no layer can be a block, or where blocks are compiled.

    A layer can be a block if its tensors are read only during its own calls, in all of ``calls``.
    Layers are in one group if they are under the same child of the component, have equal bytes, and
    are called equally often in each of ``calls``. Layers of a child of which no call reads anything
    form groups that no call uses. Layers in ``routed`` lists, and other layers that were not
    called, join the remainder.
    """
    if any(is_compiled(child) for child in module.modules()):
        return ()
    call_counts = [Counter(span.path for span in call.spans) for call in calls]
    outside = set[str]().union(*(call.outside for call in calls))
    without = tuple(f"{path}." for path in routed)
    spans = dict.fromkeys(span.path for call in calls for span in call.spans)
    called = [path for path in spans if path not in outside and not path.startswith(without)]
    read = {name.split(".")[0] for call in calls for name in call.touched}
    shared = _paths_with_tied_tensors(module)
    idle = [
        path
        for path in layer_paths(module)
        if path.split(".")[0] not in read and path not in shared and path not in spans
    ]
    layouts = lay_out(module, [*called, *idle], split_layers=True)
    groups: dict[object, list[str]] = defaultdict(list)
    for path in (*called, *idle):
        if nbytes := layouts[path].nbytes:
            groups[path.split(".")[0], nbytes, tuple(of[path] for of in call_counts)].append(path)
    return (REMAINDER, *_streamed(groups.values(), {"unblocked"})) if groups else ()


def _paths_with_tied_tensors(module: nn.Module) -> frozenset[str]:
    """Paths of the modules that hold, directly or in a submodule, a tensor that another module also
    holds."""
    users = Counter(id(tensor) for child in module.modules() for tensor in own_tensors(child))
    return frozenset(
        path[:end]
        for path, child in module.named_modules(remove_duplicate=False)
        if any(users[id(tensor)] > 1 for tensor in own_tensors(child))
        for end, letter in enumerate(f"{path}.")
        if letter == "."
    )


def _split_where_interrupted(
    units: Sequence[str], groups: Sequence[Sequence[str]]
) -> list[list[str]]:
    """``groups`` split where a block of another group is called in between: a group's blocks must
    run one after another."""
    number = {path: n for n, group in enumerate(groups) for path in group}
    kept = [path for path in units if path in number]
    return [list(run) for _, run in groupby(kept, key=number.__getitem__)]


def _streamed(groups: Iterable[Sequence[str]], taken: set[str]) -> list[BlockGroup]:
    """``groups`` of paths, each with a name after its child of the component that is not
    ``taken``."""
    return [
        BlockGroup(_unique_name(group[0].split(".")[0], taken), tuple(group), True)
        for group in groups
    ]


def _unique_name(top: str, taken: set[str]) -> str:
    name = next(
        name
        for name in (top, *(f"{top}_{number}" for number in range(2, 1000)))
        if name not in taken
    )
    taken.add(name)
    return name


def _differently_read_children(
    module: nn.Module, blocks: Sequence[str], calls: Sequence[Call]
) -> list[str]:
    """Names of the children read by others of ``calls`` than those that read most of the bytes
    outside of ``blocks``."""
    inside = tuple(f"{path}." for path in blocks)
    pattern: dict[str, set[int]] = defaultdict(set)
    weight = Counter[str]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not name.startswith(inside):
            top = name.split(".")[0]
            pattern[top] |= {number for number, call in enumerate(calls) if name in call.touched}
            weight[top] += tensor.numel()
    shares = Counter[frozenset[int]]()
    for top, found in pattern.items():
        if found:
            shares[frozenset(found)] += weight[top]
    if not shares:
        return []
    most = max(shares, key=shares.__getitem__)
    children = dict(module.named_children())
    return [top for top, found in pattern.items() if frozenset(found) != most and top in children]
