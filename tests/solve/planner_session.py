"""A problem with variants, options, orders and sessions, and plans for it in text form, for tests
of `check` and `simulate`."""

from __future__ import annotations

from dataclasses import replace

from planner_problems import component, problem

from graphrun.model.plan import Plan, parse
from graphrun.model.problem import PhaseNumbers, Problem, StageOption, Use, ValueNumbers

K = 1024

COLD = """plan {digest}
variant te bfloat16 pageable cpu
variant dit bfloat16 pinned device
option decode tiling
slot encode/0:te load
  read te
slot encode/0:te first
  run
slot refine/0:up load
  drop te
  spill embeds
  load up all from pinned
slot refine/0:up first
  read dit
  load dit unblocked[0] from pinned
  run
slot denoise/0:dit load
  drop up
  evict up all
  restore embeds
  load dit big[0] from pinned
slot denoise/0:dit first
  stream dit keep big[0] unblocked[0] ring buffer 4 KiB
  run
slot denoise/0:dit steady x3
  stream dit keep big[0] unblocked[0] ring buffer 4 KiB
  run
slot decode/0:vae load
  drop dit
  evict dit all
  load vae all from pinned
slot decode/0:vae first
  run
slot end
  evict vae all
""".replace("evict dit all", "evict dit big[0] unblocked[0]")

SESSION = """plan {digest}
leaves up all
leaves dit unblocked[0]
variant te bfloat16 pageable cpu
variant dit bfloat16 disk device
slot encode/0:te load
  read te
slot encode/0:te first
  load up all from pinned
  run
slot refine/0:up load
slot refine/0:up first
  load dit unblocked[0] from disk
  run
slot denoise/0:dit load
slot denoise/0:dit first
  stream dit keep unblocked[0] ring buffer 4 KiB
  run
slot denoise/0:dit steady x3
  stream dit keep unblocked[0] ring buffer 4 KiB
  run
slot decode/0:vae load
  load vae all from pinned
slot decode/0:vae first
  run
slot end
  evict vae all
again
slot encode/0:te load
slot encode/0:te first
  run
slot refine/0:up load
slot refine/0:up first
  run
slot denoise/0:dit load
slot denoise/0:dit first
  stream dit keep unblocked[0] ring buffer 4 KiB
  run
slot denoise/0:dit steady x3
  stream dit keep unblocked[0] ring buffer 4 KiB
  run
slot decode/0:vae load
  load vae all from pinned
slot decode/0:vae first
  run
slot end
  evict vae all
"""


def example_problem(**changes: object) -> Problem:
    """Four stages. ``te`` may compute on the CPU, ``dit`` may have its backing store on disk; nf4
    and slicing need permission."""
    te, dit = (
        component("te", ("unblocked", 1, 2 * K)),
        component("dit", ("big", 4, 2 * K), ("unblocked", 1, K)),
    )
    (te_variant,), (dit_variant,) = te.variants, dit.variants
    read_in_run = replace(
        dit_variant, load_seconds=(2.0, 1.0), read_seconds=(4.0, 2.0), transient_bytes=100
    )
    components = (
        replace(te, variants=(replace(te_variant, read_seconds=(2.0,)), _on_cpu(te_variant))),
        component("up", ("mid", 2, K), seconds_per_byte=1 / K),
        replace(
            dit,
            variants=(
                read_in_run,
                replace(
                    dit_variant,
                    backing_store="disk",
                    host_bytes=4 * K,
                    load_seconds=(2.0, 1.0),
                    disk_seconds=(4.0, 2.0),
                    stored_bytes=9 * K,
                ),
                replace(read_in_run, precision="nf4", needs="nf4"),
            ),
        ),
        component("vae", ("unblocked", 1, 3 * K), seconds_per_byte=1 / K),
    )
    decode = PhaseNumbers("decode", 0, (Use("vae", 1, (1,), (1.0,)),), 0, 3 * K, 0)
    phases = (
        PhaseNumbers("encode", 0, (Use("te", 1, (1,), (1.0,)),), 0, 500, 0),
        PhaseNumbers("refine", 0, (Use("up", 1, (1,), (8.0,)),), 0, 600, 0),
        PhaseNumbers("denoise", 0, (Use("dit", 4, (4, 4), (3.0, 1.0)),), 100, 900, 1000),
        decode,
    )
    options = (
        StageOption(
            "decode",
            "tiling",
            (replace(decode, first_bytes=K, uses=(Use("vae", 1, (1,), (2.0,)),)),),
        ),
        StageOption("decode", "slicing", (replace(decode, first_bytes=0),), needs="slicing"),
    )
    values = (
        ValueNumbers("embeds", 512, "encode", ("denoise",), 1, 2),
        ValueNumbers("latents", 256, "denoise", ("decode",), 3, 3),
    )
    instance = replace(
        problem(14 * K, components, phases, values),
        precedence=(("encode", "denoise"), ("refine", "denoise"), ("denoise", "decode")),
        options=options,
    )
    return replace(
        instance,
        hardware=replace(instance.hardware, d2h_bytes_per_second=256, h2d_bytes_per_second=512),
        **changes,
    )  # type: ignore[arg-type]


def _on_cpu(variant: object) -> object:
    return replace(
        variant, backing_store="pageable", device="cpu", read_seconds=(2.0,), slowdown=8.0
    )  # type: ignore[type-var]


def plan_for(instance: Problem, text: str) -> Plan:
    return parse(text.format(digest=instance.digest))
