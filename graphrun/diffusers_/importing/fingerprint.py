"""A dry run in which components answer with numbers that depend on what they were handed, so that two runs can be told apart.

Decides whether two ways through a pipeline are the same: each entry into a component is noted with a digest of everything that it
was handed, and answered with random numbers seeded by that digest. Where one way hands over another tensor than the other, in
another order, or one entry more, every digest behind it differs. No weights; a component's own code runs once, on meta, for shapes.

    uncut   text_encoder 3f1a   transformer 90c2   transformer 7be0   vae.decode 12dd
    cut     text_encoder 3f1a | transformer 90c2   transformer 7be0 | vae.decode 12dd     the same pipeline
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphrun import sim
from graphrun.diffusers_.call import describe_arguments
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.errors import GraphrunError, InputError
from graphrun.modules.trees import walk
from graphrun.profile.dry_run import HOLLOW_BYTES, Prober
from graphrun.sim.tensor import SimTensor


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """One entry into a component, and a digest of what it was handed."""

    component: str
    entry: str
    digest: str

    def __str__(self) -> str:
        return self.component if self.entry == "forward" else f"{self.component}.{self.entry}"


class FingerprintRun(Prober):
    """A prober that answers with numbers made of what it is handed; ``entries`` has the entries of the run that it was in last.

    ``call_locals``: the values of local variables of the function ``observed`` when a component was entered last.
    """

    def __init__(self, meta_modules: Mapping[str, nn.Module], observed: Callable[..., Any]) -> None:
        super().__init__(meta_modules)
        self.entries: list[EntryRecord] = []
        self.call_locals: dict[str, Any] = {}
        self._code = inspect.unwrap(observed).__code__

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which components echo, on an unlimited simulated accelerator; global random numbers go on as before."""
        self.entries, self.call_locals = [], {}
        self.recording.items.clear()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), sim.Machine() as machine, self.interceptor:
            machine.hollow_bytes = HOLLOW_BYTES
            yield

    def answer(self, component: str, entry: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The entry is noted, and answered in the shape of what it returns. Raises ProbeError where it cannot be traced."""
        self._capture_locals()
        try:
            _, made = self.trace(component, entry, proceed, args, kwargs)
        except GraphrunError:
            raise
        except Exception as error:
            raise ProbeError(
                f"{component}.{entry}({describe_arguments(args, kwargs)}) cannot be traced without weights: {type(error).__name__}: {error}"
            ) from error
        digest = digest_of((component, entry, args, kwargs))
        self.entries.append(EntryRecord(component, entry, digest))
        generator = torch.Generator("cpu").manual_seed(int(digest[:15], 16))
        return walk(made.template, lambda t: _random_like(t, generator).to(sim.device) if t.is_meta else t)

    def _capture_locals(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is self._code:
                self.call_locals = {name: value for name, value in frame.f_locals.items() if isinstance(value, (int, float))}
                return


def _random_like(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers near 1 in the shape of ``like``; zeros where they are indices or flags, or too many to be looked at."""
    nbytes = like.numel() * like.element_size()
    if not like.is_floating_point() or nbytes > HOLLOW_BYTES:
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu")
    return torch.randn(like.shape, generator=generator, device="cpu").to(like.dtype)


def digest_of(value: Any) -> str:
    """16 hexadecimal digits over every tensor's dtype, shape and numbers and every plain value in ``value``."""
    found = hashlib.sha256()
    _digest(value, found.update)
    return found.hexdigest()[:16]


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel() * value.element_size() <= HOLLOW_BYTES and not value.is_meta:
            raw = value.raw if isinstance(value, SimTensor) else value
            flat = torch.empty(raw.numel(), dtype=raw.dtype, device="cpu").copy_(raw.detach().reshape(-1))
            update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            update(str(key).encode())
            _digest(item, update)
    elif isinstance(value, (list, tuple)):
        update(f"[{len(value)}".encode())
        for item in value:
            _digest(item, update)
    elif isinstance(value, (str, bool, int, float, type(None))):
        update(repr(value).encode())
    elif not isinstance(value, torch.Generator):  # handed to `vae.decode` by some calls, and not drawn from there
        update(type(value).__name__.encode())
    else:
        update(repr(None).encode())


@contextmanager
def as_probe_errors(what: str, fingerprint: FingerprintRun, advice: str) -> Iterator[None]:
    """Whatever the pipeline's own code raises becomes a ProbeError that says after which entry."""
    try:
        yield
    except ProbeError as error:
        raise ProbeError(f"{error}. {advice}") from error
    except InputError:
        raise
    except Exception as error:
        entries = [str(entered) for entered in fingerprint.entries]
        after = f"after {entries[-1]} was entered" if entries else "before any component was entered"
        text = " ".join(str(error).split())[:400]
        said = f"in the pipeline's own code: {type(error).__name__}: {text}"
        raise ProbeError(f"the dry run of {what} failed {after}, {said}. {advice}") from error
