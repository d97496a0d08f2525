"""Other ways to run a stage: what a plan's option means for the stage's pipeline, and how it is undone.

tiling     the VAE works tile by tile: less activation, slightly other pictures
slicing    the VAE works picture by picture: less activation where there are several, the same pictures
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graphrun.errors import PlanError

# Option -> (method of the VAE that begins it, the one that ends it, the flag that both set).
OPTIONS: Mapping[str, tuple[str, str, str]] = {
    "tiling": ("enable_tiling", "disable_tiling", "use_tiling"),
    "slicing": ("enable_slicing", "disable_slicing", "use_slicing"),
}


@contextmanager
def applied(pipeline: Any, name: str) -> Iterator[None]:
    """``pipeline`` runs by option ``name`` ("": plainly; ``tiling+slicing``: by both) while the context stands.

    Raises PlanError for an option that there is not, or that the pipeline's VAE does not have.
    """
    vae, done = getattr(pipeline, "vae", None), []
    try:
        for each in name.split("+") if name else ():
            if each not in OPTIONS or not hasattr(vae, OPTIONS[each][0]):
                known = ", ".join(option for option, (begin, _, _) in OPTIONS.items() if hasattr(vae, begin)) or "none"
                raise PlanError(f"option {each}: {type(pipeline).__name__} has no such option; it has {known}")
            begin, end, flag = OPTIONS[each]
            if not getattr(vae, flag, False):
                getattr(vae, begin)()
                done.append(end)
        yield
    finally:
        for end in done:
            getattr(vae, end)()
