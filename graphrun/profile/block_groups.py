"""Split a component into blocks for streaming: find block modules, and group equal ones.

Everything outside of blocks is in the group of unblocked weights. The split uses the module's
structure and the order of calls in a trace; byte sizes come from `graphrun.modules.blocks.lay_out`.

    transformer_blocks.0 .. .18          group "transformer_blocks"          19 equal blocks
    single_transformer_blocks.0 .. .37   group "single_transformer_blocks"   38 equal blocks
    x_embedder, norm_out, ...            group "unblocked"                   one block, not streamed

For budgets that blocks do not fit, a component is split into layers. A layer is a module that owns
tensors which are read only during its own calls.

    transformer_blocks.0.attn.to_q, ..   group "transformer_blocks_3"   equal layers of one child,
                                                                        in call order
    scale_shift_table                    group "unblocked"              read by other code
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, count, groupby

from torch import nn

from graphrun.model.problem import BlockGroup
from graphrun.modules.blocks import lay_out
from graphrun.modules.compiled import is_compiled
from graphrun.modules.trees import (
    modules_below,
    named_modules_below,
    own_tensors,
    weights_below,
)
from graphrun.profile.recorder import layer_paths
from graphrun.profile.recording import Call

# A group with a smaller share of its component is not worth a ring buffer: its blocks are unblocked
# weights.
MIN_GROUP_SHARE = 1 / 8

# Largest size ratio within a group: T5's first block also has the table of relative positions.
SIZE_TOLERANCE = 1.1

UNBLOCKED = BlockGroup("unblocked", ("",), False)


def block_paths(module: nn.Module, routed: Collection[str] = ()) -> list[str]:
    """Return paths of the modules that may be streamed as blocks, in creation order.

    A block is an element of a `torch.nn.ModuleList` of at least two modules of one class. All but
    at most one element must have another element of about equal bytes (SD3's last block has fewer
    parts; the second half of HunyuanDiT has skip connections). If the elements consist mostly of
    such lists, the elements of the inner lists are the blocks (a UNet's attention: ten transformer
    blocks each). Lists in ``routed`` (see `routed_lists`) and lists inside compiled modules are
    skipped.
    """
    return [path for path, _ in _nested_blocks(module, "", routed)]


def routed_lists(
    units: Iterable[str], entered_blocks: Collection[str], *, by_data: bool = True
) -> set[str]:
    """Return paths of the module lists of which one call enters some elements and not others.

    Data selects such elements (mixture-of-experts layers), so they run in no fixed order and cannot
    be streamed. Unless ``by_data``, arguments other than tensors select them (Wan-Animate 2 skips a
    layer without guidance): then the other elements have one order, and the paths are those of the
    skipped elements. ``units``: candidate blocks. ``entered_blocks``: blocks that the call entered.
    """
    lists: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in units:
        lists[path.rpartition(".")[0]][path] = path in entered_blocks
    mixed = {path: states for path, states in lists.items() if len({*states.values()}) == 2}
    if by_data:
        return {*mixed}
    return {
        path for states in mixed.values() for path, is_entered in states.items() if not is_entered
    }


def _nested_blocks(
    module: nn.Module, prefix: str, routed: Collection[str]
) -> list[tuple[str, int]]:
    blocks: list[tuple[str, int]] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in routed or is_compiled(child):
            continue
        if isinstance(child, nn.ModuleList) and (sizes := _sizes_if_alike(child)):
            blocks += [
                unit
                for index, (element, nbytes) in enumerate(zip(child, sizes, strict=True))
                if f"{path}.{index}" not in routed
                for unit in _element_blocks(element, nbytes, f"{path}.{index}", routed)
            ]
        else:
            blocks += _nested_blocks(child, f"{path}.", routed)
    return blocks


def _element_blocks(
    element: nn.Module, nbytes: int, path: str, routed: Collection[str]
) -> list[tuple[str, int]]:
    inner = [] if is_compiled(element) else _nested_blocks(element, f"{path}.", routed)
    return inner if 2 * sum(size for _, size in inner) > nbytes else [(path, nbytes)]


def _sizes_if_alike(modules: nn.ModuleList) -> list[int]:
    """Return the bytes of each of ``modules``; [] if they cannot be blocks (`block_paths`)."""
    if (
        len(modules) < 2
        # CogView4's VAE has a None where it omits attention
        or any(element is None for element in modules)
        or len({_written_class(element) for element in modules}) > 1
        or not any(True for _ in modules[0].children())
    ):
        return []
    sizes = [sum(tensor.nbytes for tensor in weights_below(element)) for element in modules]
    outlier_count = sum(
        sum(a <= SIZE_TOLERANCE * b and b <= SIZE_TOLERANCE * a for b in sizes) == 1 for a in sizes
    )
    return sizes if min(sizes) > 0 and outlier_count <= min(1, len(modules) - 2) else []


def _written_class(module: nn.Module) -> str:
    """Return the class's name as written: classes of compiled modules are not intercepted."""
    kind = type(getattr(module, "_orig_mod", module))
    return f"{kind.__module__}.{kind.__qualname__}"


def group_blocks(
    module: nn.Module, calls: Sequence[Call], routed: Collection[str] = ()
) -> tuple[BlockGroup, ...]:
    """Return the block groups of ``module`` in call order, unblocked weights first.

    ``calls``: the distinct calls of the component. Blocks that run several times in one call (a
    video decoder processes frames one by one) cannot be streamed in one order, so they are
    unblocked weights.

    Blocks are in one group if they are under the same child of the component and have about equal
    bytes. A child outside of all groups becomes a group of one, named after the child, if other
    calls read it than the unblocked weights (a VAE's encoder where only `decode` is called). So
    does a loose module: one inside a block that other code reads or calls while the block does not
    run (DiT's last layer calls the first block's timestep embedding). A block is unblocked if its
    own tensors are loose, or if all of its modules are.
    """
    repeated = {
        path for call in calls for path, times in Counter(call.entered_blocks).items() if times > 1
    }
    candidates = set(block_paths(module, routed)) - repeated
    entered_blocks = [
        path
        for path in dict.fromkeys(path for call in calls for path in call.entered_blocks)
        if path in candidates
    ]
    loose = set[str]().union(*(call.loose_modules for call in calls))
    modules = dict(named_modules_below(module, repeated=True))
    loose_in = {
        path: _loose_modules(modules[path], path, loose) if loose else [] for path in entered_blocks
    }
    units = [path for path in loose_in if loose_in[path] != [path]]
    sizes = {path: layout.nbytes for path, layout in lay_out(module, units).items()}
    groups: dict[str, list[str]] = {}  # first block -> blocks
    for path in units:
        similar_groups = (
            first
            for first in groups
            if first.split(".")[0] == path.split(".")[0]
            and max(sizes[path], sizes[first]) <= SIZE_TOLERANCE * min(sizes[path], sizes[first])
        )
        groups.setdefault(next(similar_groups, path), []).append(path)
    minimum_bytes = MIN_GROUP_SHARE * sum(sizes.values())
    large_groups = [
        group
        for group in groups.values()
        if len(group) >= 2 and sum(sizes[path] for path in group) >= minimum_bytes
    ]
    runs = _split_where_interrupted(units, large_groups)
    separate_children = _differently_read_children(
        module, [path for group in runs for path in group], calls
    )
    group_names = {"unblocked", *separate_children}
    streamed_groups = _streamed_groups(runs, group_names)
    loose_paths = [path for group in runs for block in group for path in loose_in[block]]
    loose_groups = [
        BlockGroup(_unique_name(path.split(".")[-1], group_names), (path,), False)
        for path in loose_paths
    ]
    return (
        UNBLOCKED,
        *(BlockGroup(child, (child,), False) for child in separate_children),
        *loose_groups,
        *streamed_groups,
    )


def _loose_modules(module: nn.Module, path: str, loose: Collection[str]) -> list[str]:
    """Return paths of the largest modules at or below ``path`` whose tensors are all ``loose``."""
    inner_paths = [
        f"{path}.{name}" if name else path
        for name, child in named_modules_below(module)
        if own_tensors(child)
    ]
    if path in loose or (inner_paths and all(name in loose for name in inner_paths)):
        return [path]
    return [
        loose_path
        for name, child in module.named_children()
        for loose_path in _loose_modules(child, f"{path}.{name}", loose)
    ]


def group_layers(
    module: nn.Module, calls: Sequence[Call], routed: Collection[str] = ()
) -> tuple[BlockGroup, ...]:
    """Return the layer groups of ``module`` in call order, unblocked weights first.

    () if no layer can be a block, or if blocks are compiled. A layer can be a block if its tensors
    are read only during its own calls, in all of ``calls``. Layers are in one group if they are
    under the same child of the component, have equal bytes, and are called equally often in each of
    ``calls``. Layers of a child that no call reads form groups that no call uses. Layers in
    ``routed`` lists, and other layers that are not called, are unblocked weights.
    """
    if any(map(is_compiled, modules_below(module))):
        return ()
    call_counts = [Counter(span.path for span in call.spans) for call in calls]
    externally_read = set[str]().union(*(call.externally_read_layers for call in calls))
    routed_prefixes = tuple(f"{path}." for path in routed)
    spans = dict.fromkeys(span.path for call in calls for span in call.spans)
    called_layers = [
        path
        for path in spans
        if path not in externally_read and not path.startswith(routed_prefixes)
    ]
    read_children = {name.split(".")[0] for call in calls for name in call.read_weights}
    shared = _paths_with_tied_tensors(module)
    idle_layers = [
        path
        for path in layer_paths(module)
        if path.split(".")[0] not in read_children and path not in shared and path not in spans
    ]
    layouts = lay_out(module, [*called_layers, *idle_layers], split_layers=True)
    groups: dict[object, list[str]] = defaultdict(list)
    for path in (*called_layers, *idle_layers):
        if nbytes := layouts[path].nbytes:
            groups[
                path.split(".")[0], nbytes, tuple(counts[path] for counts in call_counts)
            ].append(path)
    return (UNBLOCKED, *_streamed_groups(groups.values(), {"unblocked"})) if groups else ()


def _paths_with_tied_tensors(module: nn.Module) -> frozenset[str]:
    """Return paths of modules that, with their submodules, share a tensor with another."""
    users = Counter(id(tensor) for child in modules_below(module) for tensor in own_tensors(child))
    return frozenset(
        path[:end]
        for path, child in named_modules_below(module, repeated=True)
        if any(users[id(tensor)] > 1 for tensor in own_tensors(child))
        for end, letter in enumerate(f"{path}.")
        if letter == "."
    )


def _split_where_interrupted(
    units: Sequence[str], groups: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Split ``groups`` where another group's block is called: blocks must be consecutive."""
    group_numbers = {path: n for n, group in enumerate(groups) for path in group}
    grouped_paths = [path for path in units if path in group_numbers]
    return [list(run) for _, run in groupby(grouped_paths, key=group_numbers.__getitem__)]


def _streamed_groups(groups: Iterable[Sequence[str]], group_names: set[str]) -> list[BlockGroup]:
    """Return streamable groups, named after the component's children, not as ``group_names``."""
    return [
        BlockGroup(_unique_name(group[0].split(".")[0], group_names), tuple(group), True)
        for group in groups
    ]


def _unique_name(top: str, group_names: set[str]) -> str:
    numbered_names = (f"{top}_{number}" for number in count(2))
    name = next(name for name in chain((top,), numbered_names) if name not in group_names)
    group_names.add(name)
    return name


def _differently_read_children(
    module: nn.Module, blocks: Sequence[str], calls: Sequence[Call]
) -> list[str]:
    """Return the children that other calls read than most weights outside of ``blocks``."""
    block_prefixes = tuple(f"{path}." for path in blocks)
    patterns: dict[str, set[int]] = defaultdict(set)
    weights = Counter[str]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not name.startswith(block_prefixes):
            top = name.split(".")[0]
            patterns[top] |= {
                number for number, call in enumerate(calls) if name in call.read_weights
            }
            weights[top] += tensor.numel()
    shares = Counter[frozenset[int]]()
    for top, call_numbers in patterns.items():
        if call_numbers:
            shares[frozenset(call_numbers)] += weights[top]
    if not shares:
        return []
    main_pattern = max(shares, key=shares.__getitem__)
    children = dict(module.named_children())
    return [
        top
        for top, call_numbers in patterns.items()
        if frozenset(call_numbers) != main_pattern and top in children
    ]
