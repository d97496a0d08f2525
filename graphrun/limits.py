"""Limits of files and requests. Files cannot raise a limit; whoever runs graphrun can.

graphrun --limit steps=20000 run GRAPH ...            graphrun.raise_limits(steps=20000)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from graphrun.errors import InputError


@dataclass(slots=True)
class Limits:
    """The limits, each with its reason. A name without a unit is a count."""

    # of a JSON file: plans take 0.1 to 10 MB, traces a few; parsed JSON takes up to 25 times that
    text_bytes: int = 2**24
    # of a graph or a cluster file: the largest reference graph has 4 KB; PyYAML takes 1 s per MiB
    yaml_bytes: int = 2**20
    prompts_bytes: int = 2**26  # of a file of requests: 100,000 long prompts
    requests: int = 100_000  # of one batch: a month at 25 s each
    # of JSON and YAML: the deepest configurations of transformers have 6; Python's own limit is
    # 1000 frames
    nesting: int = 100
    # of an integer: as many as 2**64 has. Python refuses to read or print more than 4300
    digits: int = 20
    # of a graph file, with its aliases expanded: the largest reference graph has 400
    nodes: int = 20_000
    problems: int = 100  # of a graph file, reported together
    entries: int = 2_000  # of a short list in a plan file: components, groups, phases, values, ...
    placements: int = 1_000_000  # of a plan file: slots times blocks; reference graphs have 80,000
    # of a plan file: blocks that a run computes; reference graphs have 100,000
    block_calls: int = 2_000_000
    # allocations replayed to count a plan's pages; reference graphs take 130,000
    replay_steps: int = 2_000_000
    devices: int = 200  # of a cluster, and its hosts: each pair of hosts is considered
    # of a graph: reference graphs have 3 to 6; orders of stages are searched, and their number
    # grows exponentially
    stages: int = 16
    calls: int = 100_000  # of components in a dry run: Pyramid-Flow and Wan make 10,000
    steps: int = 1_000  # of a denoising loop: diffusers' schedulers have 1,000 training timesteps
    # an integer in a scheduler's configuration: diffusers allocates that many numbers; usually
    # 1,000
    timesteps: int = 2**20
    pixels: int = 2**25  # of an image, generated or read: 8K UHD has 33.2 million
    # of all frames of a video together: 257 frames of 1216 x 704, 0.8 GB in RAM
    film_pixels: int = 2**28
    # of audio, all channels together: 12 minutes of stereo at 44.1 kHz; numbers of a tensor input
    samples: int = 2**26
    characters: int = 2**20  # of a text input: more than any text encoder reads
    # of one component, layers within layers: HunyuanVideo's transformer has 2,000
    modules: int = 20_000


LIMITS = Limits()


def raise_limits(**values: int) -> None:
    """Set limits of this process by name. Raises InputError for an unknown name.

    Example:

        graphrun.raise_limits(steps=2000)
    """
    names = [field.name for field in fields(Limits)]
    for name, value in values.items():
        if name not in names:
            raise InputError(f"there is no limit {name!r}; limits are {', '.join(names)}")
        if not 0 < value < 2**63:
            raise InputError(f"limit {name}={value}: give a positive integer")
        setattr(LIMITS, name, value)


def require(
    name: str, value: int, statement: str, location: str = "", kind: type[InputError] = InputError
) -> None:
    """Raise ``kind`` if ``value`` exceeds the limit ``name``; ``statement`` has the number."""
    if value > (maximum := getattr(LIMITS, name)):
        suggestion = (
            f"if this is meant: graphrun --limit {name}={value} ..., in Python "
            f"graphrun.raise_limits({name}={value})"
        )
        raise kind(f"{statement}, and at most {maximum:,} are accepted; {suggestion}", location)
