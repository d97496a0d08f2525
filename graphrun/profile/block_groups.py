"""Splits a component into blocks: which modules pass one after another when it is streamed, and what stays together as the rest.

Decides names and classes from the module's structure and from a trace's order; bytes come from `components.blocks.lay_out`.

    transformer_blocks.0 .. .18          class "transformer_blocks"          19 equal blocks
    single_transformer_blocks.0 .. .37   class "single_transformer_blocks"   38 equal blocks
    x_embedder, norm_out, ...            class "remainder"                        one, never streamed

By layer, where blocks do not fit: every module that owns tensors and is only read in its own calls is a block.

    transformer_blocks.0.attn.to_q, .attn.to_k, ..    class "transformer_blocks_3"   equal layers of one child, in call order
    scale_shift_table                                 class "remainder"                   read by other code: never streamed
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from torch import nn

from graphrun.model.problem import BlockGroup
from graphrun.modules.blocks import lay_out
from graphrun.profile.recorder import layer_paths
from graphrun.profile.recording import Call

# A class of blocks that holds less than this share of its component is not worth a staging ring: it stays with the rest.
SMALLEST_SHARE = 1 / 8

# Blocks of one class differ by less than this: T5's first block holds the table of relative positions besides.
SAME_SIZE = 1.1


def unit_paths(module: nn.Module, choices: Collection[str] = ()) -> list[str]:
    """Paths of the modules in which ``module`` may be streamed, in the order of their creation.

    A unit is an element of a list of at least two modules of one class, all but one of which have others of equal bytes beside them
    (SD3's last block does without a part; HunyuanDiT's second half has skips). Where the elements themselves hold such
    lists that make up most of them (a UNet's attention: ten transformer blocks each), the inner elements are the units. The lists
    in ``choices`` are left out (see `choices_among`).
    """
    return [path for path, _ in _units(module, "", choices)]


def choices_among(units: Iterable[str], entered: Collection[str]) -> set[str]:
    """The lists of which one call enters some elements and not others: experts, of which data picks some, have no fixed order."""
    lists: dict[str, set[bool]] = defaultdict(set)
    for path in units:
        lists[path.rpartition(".")[0]].add(path in entered)
    return {path for path, found in lists.items() if len(found) == 2}


def _units(module: nn.Module, prefix: str, choices: Collection[str]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in choices:
            continue
        if isinstance(child, nn.ModuleList) and _alike(child):
            found += [unit for index, element in enumerate(child) for unit in _element(element, f"{path}.{index}", choices)]
        else:
            found += _units(child, f"{path}.", choices)
    return found


def _element(element: nn.Module, path: str, choices: Collection[str]) -> list[tuple[str, int]]:
    nbytes = _nbytes(element)
    inner = _units(element, f"{path}.", choices)
    return inner if 2 * sum(size for _, size in inner) > nbytes else [(path, nbytes)]


def _alike(modules: nn.ModuleList) -> bool:
    if any(element is None for element in modules):  # CogView4's VAE keeps a place for attention that it does without
        return False
    sizes = sorted(_nbytes(element) for element in modules)
    same = len(modules) >= 2 and len({type(element) for element in modules}) == 1 and any(True for _ in modules[0].children())
    alone = sum(sum(a <= SAME_SIZE * b and b <= SAME_SIZE * a for b in sizes) == 1 for a in sizes)
    return same and sizes[0] > 0 and alone <= min(1, len(modules) - 2)


def _nbytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def group_blocks(
    module: nn.Module,
    entered: Sequence[str],
    touched: Sequence[Iterable[str]],
    choices: Collection[str] = (),
    loose: Collection[str] = (),
) -> tuple[BlockGroup, ...]:
    """The classes of blocks of ``module``, in call order, the rest first.

    ``entered``: paths of `unit_paths` in the order in which a trace entered them. ``touched``: for each distinct call, the names of
    the parameters and buffers it read. Units are of one class when they lie under the same child of the component and have equal
    bytes. A child outside all classes that other calls read than the rest becomes a class of one under its own name (a VAE's
    encoder where only `decode` is called). So does what is ``loose`` in a block: other code than the block's needs it too, when
    the block has passed (DiT's last layer asks the first block for the embedding of the time). A block all of which is
    loose stays with the rest.
    """
    known = set(unit_paths(module, choices))
    modules = dict(module.named_modules(remove_duplicate=False))
    held = {path: _held(modules[path], path, loose) if loose else [] for path in dict.fromkeys(entered) if path in known}
    units = [path for path in held if held[path] != [path]]
    sizes = {path: layout.nbytes for path, layout in lay_out(module, units).items()}
    groups: list[list[str]] = []
    for path in units:
        for group in groups:
            near = max(sizes[path], sizes[group[0]]) <= SAME_SIZE * min(sizes[path], sizes[group[0]])
            if near and path.split(".")[0] == group[0].split(".")[0]:
                group.append(path)
                break
        else:
            groups.append([path])
    least = SMALLEST_SHARE * sum(sizes.values())
    kept = _in_turn(units, [group for group in groups if len(group) >= 2 and sum(sizes[path] for path in group) >= least])
    apart = _apart(module, [path for group in kept for path in group], touched)
    taken = {"remainder", *apart}
    streamed = [BlockGroup(_name(group[0].split(".")[0], taken), tuple(group), True) for group in kept]
    beside = [path for group in kept for block in group for path in held[block]]
    single = [BlockGroup(_name(path.split(".")[-1], taken), (path,), False) for path in beside]
    return (BlockGroup("remainder", ("",), False), *(BlockGroup(child, (child,), False) for child in apart), *single, *streamed)


def _held(module: nn.Module, path: str, loose: Collection[str]) -> list[str]:
    """The largest modules at ``path`` and below all of whose tensors are ``loose``."""
    inside = [name for name, child in module.named_modules(prefix=path) if _owns(child)]
    if path in loose or (inside and all(name in loose for name in inside)):
        return [path]
    return [held for name, child in module.named_children() for held in _held(child, f"{path}.{name}", loose)]


def _owns(module: nn.Module) -> bool:
    return any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))


def group_layers(module: nn.Module, calls: Sequence[Call], choices: Collection[str] = ()) -> tuple[BlockGroup, ...]:
    """The classes of layers of ``module`` in the order of their first calls, the rest first; () where no layer may be a block.

    A layer may be one if nothing reads its tensors outside of its own calls in any of ``calls``.
    Of one class are layers of one child of the component with equal bytes that are called equally often in each of ``calls``, and
    that either all fit beside what lives during their call without making its peak, or do not. Layers of a child of which nothing
    is read are of classes that no call uses; what data chooses (``choices``) and what else was not called stays with the rest.
    """
    turns = [Counter(span.path for span in call.spans) for call in calls]
    outside = frozenset().union(*(call.outside for call in calls))
    called = [path for path in dict.fromkeys(span.path for call in calls for span in call.spans) if path not in outside]
    called = [path for path in called if not any(path.startswith(f"{of}.") for of in choices)]
    read = {name.split(".")[0] for call in calls for name in call.touched}
    shared = _shared(module)
    idle = [path for path in layer_paths(module) if path.split(".")[0] not in read and path not in shared]
    layouts = lay_out(module, [*called, *idle], split_layers=True)
    room = _rooms(calls)
    groups: dict[object, list[str]] = {}
    for path in [path for path in (*called, *idle) if layouts[path].nbytes]:
        nbytes = layouts[path].nbytes
        key = path.split(".")[0], nbytes, tuple(of[path] for of in turns), nbytes <= room.get(path, 0)
        groups.setdefault(key, []).append(path)
    if not groups:
        return ()
    taken = {"remainder"}
    found = [BlockGroup(_name(group[0].split(".")[0], taken), tuple(group), True) for group in groups.values()]
    return (BlockGroup("remainder", ("",), False), *found)


def _shared(module: nn.Module) -> frozenset[str]:
    """Paths of what holds a tensor, in it or below, that another module holds too."""
    users = Counter[int]()
    for child in module.modules():
        users.update(id(tensor) for tensor in (*child._parameters.values(), *child._buffers.values()) if tensor is not None)
    twice = {key for key, count in users.items() if count > 1}
    if not twice:
        return frozenset()
    found = set[str]()
    for path, child in module.named_modules(remove_duplicate=False):
        if any(id(tensor) in twice for tensor in (*child._parameters.values(), *child._buffers.values())):
            found.update(path[:end] for end, letter in enumerate(f"{path}.") if letter == ".")
            found.add("")
    return frozenset(found)


def _rooms(calls: Sequence[Call]) -> dict[str, int]:
    """Per layer, the least by which its call's peak is above what lives while it runs."""
    found: dict[str, int] = {}
    for call in calls:
        live, levels = 0, [0]
        sizes: dict[int, int] = {}
        for key, nbytes in call.events:
            if nbytes > 0:
                sizes[key] = nbytes
            live += nbytes if nbytes > 0 else -sizes.pop(key, 0) if nbytes == 0 else 0
            levels.append(live)
        peak = max(levels)
        for span in call.spans:
            room = peak - max(levels[span.begin : span.end + 1])
            found[span.path] = min(found.get(span.path, room), room)
    return found


def _in_turn(units: Sequence[str], groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """``groups`` cut where units of another group are called between: the blocks of a class pass one after another."""
    number = {path: n for n, group in enumerate(groups) for path in group}
    kept = [path for path in units if path in number]
    return [list(run) for _, run in groupby(kept, key=number.__getitem__)]


def _name(top: str, taken: set[str]) -> str:
    name = next(name for name in (top, *(f"{top}_{number}" for number in range(2, 1000))) if name not in taken)
    taken.add(name)
    return name


def _apart(module: nn.Module, blocks: Sequence[str], touched: Sequence[Iterable[str]]) -> list[str]:
    """Children whose remaining tensors are read by other calls than most of the rest is."""
    inside = tuple(f"{path}." for path in blocks)
    names = [(name, t) for name, t in (*module.named_parameters(), *module.named_buffers()) if not name.startswith(inside)]
    calls = [frozenset(names_read) for names_read in touched]
    pattern: dict[str, set[int]] = defaultdict(set)
    weight: dict[str, int] = defaultdict(int)
    for name, tensor in names:
        top = name.split(".")[0]
        pattern[top] |= {number for number, read in enumerate(calls) if name in read}
        weight[top] += tensor.numel()
    shares: dict[frozenset[int], int] = defaultdict(int)
    for top, found in pattern.items():
        if found:
            shares[frozenset(found)] += weight[top]
    if not shares:
        return []
    most = max(shares, key=shares.__getitem__)
    children = dict(module.named_children())
    return [top for top, found in pattern.items() if frozenset(found) != most and top in children]
