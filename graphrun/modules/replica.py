"""A second module with the code and the settings of a live one, for weights on another device.

    live module     attributes   weights on the host
                      |            |
                      | shared     | none: on meta, until blocks are bound
    replica         attributes   weights on the secondary device

A replica shares what the live module's attributes refer to (configuration, processors, scales of
LoRAs), so it computes what the live module computes now. `refresh` takes over attributes that
changed since.
"""

from __future__ import annotations

import copy
import types
from functools import partial

import torch
from torch import nn

from graphrun.modules.compiled import is_compiled
from graphrun.modules.memos import DIFFUSERS_HOOKS, MODULE_ATTRIBUTES
from graphrun.modules.trees import PLAIN, found_in, modules_below, own_tensors

_TABLES = ("_parameters", "_buffers", "_modules")
_BOUND = (types.MethodType, types.FunctionType, partial)


def can_be_replicated(module: nn.Module) -> bool:
    """Return whether a `replica` of ``module`` computes with its own weights only.

    Not so if an attribute of a module in it calls code of that instance, or refers to modules or
    tensors in other ways than as its parts and weights.
    """
    return all(map(_is_plain, modules_below(module)))


def replica(module: nn.Module) -> nn.Module:
    """Return a replica of ``module``, which `can_be_replicated`, with its weights on meta."""
    twins = {id(child): _twin(child) for child in modules_below(module)}
    meta_tensors = {
        id(tensor): _on_meta(tensor)
        for child in modules_below(module)
        for tensor in own_tensors(child)
    }
    for child in modules_below(module):
        tables = vars(twins[id(child)])
        for name in ("_parameters", "_buffers"):
            tables[name] = {
                key: None if tensor is None else meta_tensors[id(tensor)]
                for key, tensor in getattr(child, name).items()
            }
        tables["_modules"] = {
            key: None if part is None else twins[id(part)] for key, part in child._modules.items()
        }
    return twins[id(module)]


def refresh(twin: nn.Module, module: nn.Module) -> None:
    """Give the replica ``twin`` the attributes that ``module`` has now, and no others.

    ``module`` has the same parts as when the replica was made.
    """
    for twin_child, child in zip(modules_below(twin), modules_below(module), strict=True):
        _take_attributes(twin_child, child)


def _twin(child: nn.Module) -> nn.Module:
    twin = type(child).__new__(type(child))
    _take_attributes(twin, child)
    return twin


def _take_attributes(twin: nn.Module, child: nn.Module) -> None:
    """Replace the attributes of ``twin``, except its tables of weights and parts. Hooks are the
    same, in tables of its own: blocks of one of the two may get further hooks."""
    tables = {name: table for name, table in vars(twin).items() if name in _TABLES}
    vars(twin).clear()
    vars(twin).update(vars(child) | tables)
    for name in MODULE_ATTRIBUTES - {*_TABLES}:
        if isinstance(table := vars(child).get(name), dict):
            vars(twin)[name] = copy.copy(table)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta_tensor = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad)
    return meta_tensor


def _is_plain(child: nn.Module) -> bool:
    attributes = {key: value for key, value in vars(child).items() if key not in MODULE_ATTRIBUTES}
    # diffusers creates a registry without hooks in the first call
    hooks = getattr(attributes.pop(DIFFUSERS_HOOKS, None), "hooks", {})
    return (
        not is_compiled(child)
        and not isinstance(child, torch.jit.ScriptModule)
        and not hooks
        and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in own_tensors(child))
        and not any(isinstance(value, _BOUND) for value in attributes.values())
        and not any(
            any(next(found_in(value, kind), None) is not None for kind in (nn.Module, torch.Tensor))
            for value in attributes.values()
            if type(value) not in PLAIN
        )
    )
