"""A plan's text form: round trip, and the messages of syntax errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrun.errors import PlanError
from graphrun.model.plan import (
    Drop,
    Evict,
    Load,
    Plan,
    Read,
    Restore,
    Run,
    Slot,
    Spill,
    Stream,
    parse,
)

TEXT = """plan 0123456789abcdef
slot encode/1:t5 load
  evict clip all
  load t5 all from pinned
slot encode/1:t5 first
  run
slot denoise/0:transformer steady x27
  stream transformer keep double[0,8,16] single[0-3,12,24,36-37] ring buffer 680 MiB
  load vae unblocked[0] from pinned
  run
slot end
  evict vae all
  evict transformer double[0]"""


def test_text_parses_to_a_plan_and_back() -> None:
    plan = parse(TEXT)
    assert plan.slots[2] == Slot(
        "denoise/0:transformer",
        "steady",
        27,
        (
            Stream(
                "transformer",
                (("double", (0, 8, 16)), ("single", (0, 1, 2, 3, 12, 24, 36, 37))),
                680 * 2**20,
            ),
            Load("vae", (("unblocked", (0,)),)),
            Run(),
        ),
    )
    assert plan.slots[3] == Slot(
        "", "end", 0, (Evict("vae", None), Evict("transformer", (("double", (0,)),)))
    )
    assert str(plan) == TEXT.replace("36-37", "36,37")


CHOSEN = """plan 0123456789abcdef
variant transformer nf4 pinned device
variant t5 bfloat16 disk device
option decode tiling
order encode refine decode
slot encode/0:t5 load
  drop clip
  evict clip all
  spill embeds
  restore mask
  read t5
  load t5 all from pageable
slot end
again
slot encode/0:t5 load
slot end"""


def test_choices_come_before_the_slots_and_further_runs_after_them() -> None:
    plan = parse(CHOSEN)
    assert plan.variants == (("transformer", "nf4 pinned device"), ("t5", "bfloat16 disk device"))
    assert plan.options == (("decode", "tiling"),)
    assert plan.order == ("encode", "refine", "decode")
    kinds = (
        Drop("clip"),
        Evict("clip", None),
        Spill("embeds"),
        Restore("mask"),
        Read("t5"),
        Load("t5", None, "pageable"),
    )
    assert plan.slots == (Slot("encode/0:t5", "load", 0, kinds), Slot("", "end", 0, ()))
    assert plan.further_slots == (Slot("encode/0:t5", "load", 0, ()), Slot("", "end", 0, ()))
    assert str(plan) == CHOSEN
    loose = CHOSEN.replace(
        "order encode refine decode", "# comes first\n  order   encode refine\norder decode"
    )
    assert parse(loose) == plan, "an order may span several lines"


def test_comments_blank_lines_and_indentation_are_ignored() -> None:
    loose = TEXT.replace("  run", "run   # to the end").replace(
        "slot end", "\n# the device goes back\n\t slot   end"
    )
    assert parse(loose) == parse(TEXT)


@pytest.mark.parametrize(
    ("ring_buffer_bytes", "text"),
    [
        (680 * 2**20, "680 MiB"),
        (3 * 2**10, "3 KiB"),
        (2**30, "1024 MiB"),
        (513, "513 B"),
        (0, "0 MiB"),
    ],
)
def test_ring_buffer_bytes_are_exact(ring_buffer_bytes: int, text: str) -> None:
    plan = Plan("d", (Slot("a/0:b", "first", 1, (Stream("b", (), ring_buffer_bytes), Run())),))
    assert f"stream b keep none ring buffer {text}" in str(plan)
    assert parse(str(plan)) == plan


NAMES = st.from_regex(r"[a-z_][a-z_0-9.]{0,8}", fullmatch=True)
INDICES = st.sets(st.integers(0, 40), min_size=1, max_size=9).map(
    lambda groups: tuple(sorted(groups))
)
BLOCKS = st.none() | st.dictionaries(NAMES, INDICES, max_size=3).map(
    lambda mapping: tuple(mapping.items())
)
ACTIONS = st.one_of(
    st.builds(Load, NAMES, BLOCKS, st.sampled_from(["pinned", "pageable", "disk", "file"])),
    st.builds(Evict, NAMES, BLOCKS),
    st.builds(Stream, NAMES, BLOCKS, st.integers(0, 2**40)),
    st.builds(Run),
    st.builds(Spill, NAMES),
    st.builds(Restore, NAMES),
    st.builds(Drop, NAMES),
    st.builds(Read, NAMES),
)
PHASES = st.builds(
    lambda stage, index, uses: f"{stage}/{index}:{'+'.join(uses)}",
    NAMES,
    st.integers(0, 9),
    st.lists(NAMES, max_size=2),
)
SLOTS = st.one_of(
    st.builds(
        Slot,
        PHASES,
        st.sampled_from(["load", "first", "steady"]),
        st.integers(0, 99),
        st.lists(ACTIONS, max_size=4).map(tuple),
    ),
    st.builds(
        Slot, st.just(""), st.just("end"), st.just(0), st.lists(ACTIONS, max_size=2).map(tuple)
    ),
)


WORDS = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True)
VARIANTS = st.builds(
    lambda precision, backing_store, device: f"{precision} {backing_store} {device}",
    WORDS,
    st.sampled_from(["pinned", "pageable", "disk", "file"]),
    st.sampled_from(["device", "cpu"]),
)
RUN = st.lists(SLOTS, min_size=1, max_size=4).map(tuple)
PLANS = st.builds(
    Plan,
    st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    RUN,
    st.lists(st.tuples(NAMES, VARIANTS), max_size=3).map(tuple),
    st.lists(st.tuples(NAMES, WORDS), max_size=2).map(tuple),
    st.lists(NAMES, max_size=3).map(tuple),
    st.just(()) | RUN,
)


@given(PLANS | st.builds(Plan, st.from_regex(r"[0-9a-f]{16}", fullmatch=True), st.just(())))
def test_every_plan_round_trips(plan: Plan) -> None:
    assert parse(str(plan)) == plan
    assert parse(str(plan)).digest == plan.digest


@pytest.mark.parametrize(
    ("line", "line_text", "expected"),
    [
        (1, "plam 01", "expected 'plan DIGEST'"),
        (2, "run", "expected a slot"),
        (
            2,
            "slot encode/1:t5 middle",
            "expected 'slot PHASE load|first|steady [xCALLS]' or 'slot end'",
        ),
        (7, "slot denoise/0:transformer steady", "expected the calls of a steady slot"),
        (4, "lode t5 all from pinned", "expected slot or one of load, evict, stream, run"),
        (4, "load t5 all", "expected 'load COMPONENT BLOCKS from pinned|pageable|disk|file'"),
        (
            4,
            "load t5 all from tape",
            "expected 'load COMPONENT BLOCKS from pinned|pageable|disk|file'",
        ),
        (4, "load t5 double[] from pinned", "expected blocks as 'all', 'none' or"),
        (4, "load t5 double[2,1] from pinned", "ascending order"),
        (4, "load t5 double[4-2] from pinned", "ascending order"),
        (4, "load t5 a[1] a[2] from pinned", "each block group once"),
        (
            8,
            "stream transformer keep all ring buffer 680",
            "expected 'stream COMPONENT keep BLOCKS ring buffer SIZE",
        ),
        (9, "run all", "expected 'run'"),
        (4, "read", "expected 'read COMPONENT'"),
        (
            2,
            "variant t5 nf4 tape device",
            "expected 'variant COMPONENT PRECISION pinned|pageable|disk|file device|device1|cpu'",
        ),
        (2, "option decode", "expected 'option STAGE NAME'"),
        (2, "order", "expected 'order STAGE STAGE ...'"),
        (2, "again", "expected a slot"),
        (4, "option decode tiling", "expected slot or one of load, evict"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(
    line: int, line_text: str, expected: str
) -> None:
    lines = TEXT.splitlines()
    lines[line - 1] = line_text
    with pytest.raises(PlanError) as error_info:
        parse("\n".join(lines), name="some.plan")
    assert str(error_info.value).startswith(f"some.plan:{line}: ")
    assert expected in str(error_info.value)


def test_empty_text_is_refused() -> None:
    with pytest.raises(PlanError, match="plan:1: expected 'plan DIGEST'"):
        parse("# nothing\n")
