"""`check`: for each rule of choices, backing stores, values, RAM and sessions, a plan that breaks
it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_session import COLD, SESSION, K, example_problem, plan_for

from graphrun.model.problem import Directive, Problem
from graphrun.verify.check import check


def broken_rules(text: str, problem: Problem | None = None) -> list[tuple[str, int, int]]:
    problem = problem or example_problem()
    return [(v.rule, v.slot, v.action) for v in check(problem, plan_for(problem, text))]


def broken_rules_in_session(text: str = SESSION, **changes: object) -> list[tuple[str, int, int]]:
    return broken_rules(text, example_problem(runs=2, **changes))


def test_the_unchanged_plans_are_valid() -> None:
    assert broken_rules(COLD) == []
    assert broken_rules_in_session() == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("variant te bfloat16 pageable cpu\n", "", "variant"),
        ("variant te bfloat16 pageable cpu\n", "variant te bfloat16 pageable cpu\n" * 2, "variant"),
        ("variant te bfloat16 pageable cpu", "variant te bfloat16 disk cpu", "variant"),
        (
            "variant te bfloat16 pageable cpu",
            "variant te bfloat16 pageable cpu\nvariant tee bfloat16 pinned device",
            "variant",
        ),
        ("variant dit bfloat16 pinned device", "variant dit nf4 pinned device", "variant"),
        ("option decode tiling\n", "option decode tiling\n" * 2, "option"),
        ("option decode tiling", "option decode tailing", "option"),
        ("option decode tiling", "option refine tiling", "option"),
        ("option decode tiling", "option decode slicing", "option"),
        ("option decode tiling", "order encode denoise refine decode", "order"),
        ("option decode tiling", "order encode refine denoise", "order"),
        ("option decode tiling", "order encode refine denoise decode upscale", "order"),
    ],
)
def test_an_invalid_choice_is_the_only_violation_reported(old: str, new: str, rule: str) -> None:
    assert old in COLD
    assert broken_rules(COLD.replace(old, new)) == [(rule, -1, -1)]


def test_permitted_variants_and_options_may_be_chosen() -> None:
    problem = example_problem(allow=("nf4", "slicing"))
    text = COLD.replace("variant dit bfloat16 pinned", "variant dit nf4 pinned").replace(
        "decode tiling", "decode slicing"
    )
    assert broken_rules(text, problem) == []
    assert {rule for rule, _, _ in broken_rules(text, example_problem(allow=("nf4",)))} == {
        "option"
    }


def test_the_directive_pin_demands_a_pinned_backing_store() -> None:
    assert broken_rules(COLD, example_problem(directives=(Directive("pin", "te"),))) == [
        ("pin", -1, -1)
    ]
    assert broken_rules(COLD, example_problem(directives=(Directive("pin", "dit"),))) == []


def test_keep_and_whole_forbid_computing_on_the_cpu() -> None:
    assert ("keep", 1, -1) in broken_rules(
        COLD, example_problem(directives=(Directive("keep", "te"),))
    )
    assert broken_rules(COLD, example_problem(directives=(Directive("whole", "te"),))) == [
        ("whole", 0, -1),
        ("whole", 1, -1),
    ]


def test_slots_must_follow_the_chosen_order_of_stages() -> None:
    swapped = COLD.replace(
        "option decode tiling", "option decode tiling\norder refine encode denoise decode"
    )
    assert broken_rules(swapped) == [("structure", 0, -1)]
    assert (
        broken_rules(
            COLD.replace(
                "option decode tiling", "option decode tiling\norder encode refine denoise decode"
            )
        )
        == []
    )
    assert broken_rules(swapped, example_problem(precedence=None)) == [("order", -1, -1)]
    default_order = COLD.replace(
        "option decode tiling", "option decode tiling\norder encode refine denoise decode"
    )
    assert broken_rules(default_order, example_problem(precedence=None)) == []
    encode, refine, denoise = (
        COLD.index("slot encode"),
        COLD.index("slot refine"),
        COLD.index("slot denoise"),
    )
    late_spill = COLD[refine:denoise].replace("  drop te\n  spill embeds\n", "") + COLD[
        encode:refine
    ].replace("read te", "drop up\n  read te")
    denoise_on = (
        COLD[denoise:].replace("  drop up\n", "  drop te\n").replace("  restore embeds\n", "")
    )
    text = (
        COLD[:encode].replace("option", "order refine encode denoise decode\noption")
        + late_spill
        + denoise_on
    )
    assert broken_rules(text) == [], "encode comes second, so embeds has no gap"


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("  read te\n", "", [("host-missing", 1, -1), ("drop", 2, 0)]),
        (
            "  read dit\n",
            "",
            [
                ("host-missing", 3, 0),
                ("host-missing", 4, 3),
                ("host-missing", 5, 0),
                ("host-missing", 6, 0),
                ("drop", 7, 0),
            ],
        ),
        ("  drop up\n", "  drop up\n  drop up\n", [("drop", 4, 1)]),
        ("  read dit\n", "  read dit\n  read up\n", [("read", 3, 1)]),
        ("  restore embeds\n", "  restore embeds\n  read dit\n", [("read", 4, 3)]),
        ("  evict vae all", "  evict vae all\n  read dit", [("read", 9, 1)]),
        (
            "  drop up\n",
            "  drop dit\n  drop up\n",
            [
                ("host-missing", 4, 4),
                ("host-missing", 5, 0),
                ("host-missing", 6, 0),
                ("drop", 7, 0),
            ],
        ),
        ("  drop dit\n", "  drop vae\n", [("host-missing", 7, 2)]),
        ("  read te\n", "  read tee\n  read te\n", [("unknown", 0, 0)]),
        ("  drop dit\n", "  drop dot\n", [("unknown", 7, 0)]),
        ("  read te\n", "  read te\n  load te all from pageable\n", [("cpu", 0, 1)]),
        (
            "  run\nslot refine/0:up load",
            "  stream te keep none ring buffer 4 KiB\n  run\nslot refine/0:up load",
            [("cpu", 1, 0)],
        ),
        ("  spill embeds\n", "", [("restore", 4, 2)]),
        ("  spill embeds\n", "  spill latents\n", [("spill", 2, 1), ("restore", 4, 2)]),
        ("  spill embeds\n", "  spill embeds\n  spill embeds\n", [("spill", 2, 2)]),
        ("  spill embeds\n", "  spill embodies\n", [("unknown", 2, 1), ("restore", 4, 2)]),
        ("  restore embeds\n", "", [("restore", 4, -1)]),
        ("  restore embeds\n", "  restore embeds\n  restore embeds\n", [("restore", 4, 3)]),
        ("  read dit\n", "  spill embeds\n  read dit\n", [("spill", 3, 0)]),
        ("  spill embeds\n", "  restore embeds\n", [("restore", 2, 1), ("restore", 4, 2)]),
        (
            "  spill embeds\n  load up all from pinned\nslot refine/0:up first\n",
            "  load up all from pinned\nslot refine/0:up first\n  spill embeds\n",
            [("spill", 3, 0), ("restore", 4, 2)],
        ),
        (
            "  read dit\n  load dit unblocked[0] from pinned",
            "  load dit unblocked[0] from pinned\n  read dit",
            [("order", 3, 1)],
        ),
        ("  drop te\n  spill embeds\n", "  spill embeds\n  drop te\n", [("order", 2, 1)]),
        (
            "  evict up all\n  restore embeds\n",
            "  restore embeds\n  evict up all\n",
            [("order", 4, 2)],
        ),
    ],
)
def test_a_violation_of_a_host_rule_names_slot_and_action(
    old: str, new: str, rules: list[tuple[str, int, int]]
) -> None:
    assert old in COLD
    assert broken_rules(COLD.replace(old, new)) == rules


def details(text: str, problem: Problem) -> list[str]:
    return [violation.detail for violation in check(problem, plan_for(problem, text))]


def test_a_violation_says_where_a_missing_backing_store_is() -> None:
    problem = example_problem()
    without_read = details(COLD.replace("  read te\n", ""), problem)
    assert without_read[0] == "the backing store of te is needed, but it is not read yet"
    after_drop = details(COLD.replace("  drop up\n", "  drop dit\n  drop up\n"), problem)
    assert after_drop[0] == "the backing store of dit is needed, but it is dropped already"


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        ("  read dit\n", "  read dit\n  read up\n", "up was read before"),
        ("  spill embeds\n", "  spill latents\n", "no gap between consumers of latents begins at "),
        ("  spill embeds\n", "", "embeds must not be restored in this slot"),
        ("  restore embeds\n", "", "embeds is still on the host, but denoise/0:dit consumes it"),
        ("  drop up\n", "  drop up\n  drop up\n", "the backing store of up is not in RAM"),
        ("denoise/0:dit first\n", "denoise/0:dit first\n  spill embeds\n", "moved in a first slot"),
    ],
)
def test_a_violation_of_a_host_rule_says_what_is_wrong(old: str, new: str, detail: str) -> None:
    assert old in COLD
    assert [text for text in details(COLD.replace(old, new), example_problem()) if detail in text]


def test_what_is_copied_from_disk_is_not_read() -> None:
    problem = example_problem(runs=2)
    text = SESSION.replace("  read te\n", "  read te\n  read dit\n", 1)
    assert details(text, problem) == ["dit has its backing store on disk"]


def test_a_component_on_the_cpu_cannot_compute_from_a_backing_store_on_disk() -> None:
    te, *other_components = example_problem().components
    on_disk = replace(te.variants[1], backing_store="disk", read_seconds=(), disk_seconds=(2.0,))
    problem = example_problem(components=(replace(te, variants=(on_disk,)), *other_components))
    text = COLD.replace("variant te bfloat16 pageable", "variant te bfloat16 disk")
    text = text.replace("  read te\n", "").replace("  drop te\n", "")
    assert details(text, problem) == ["the backing store of te is needed, but it is on disk"]


def test_the_end_slot_reads_no_backing_store() -> None:
    text = COLD.replace("  read te\n", "").replace("  evict vae all", "  evict vae all\n  read te")
    assert broken_rules(text) == [("host-missing", 1, -1), ("drop", 2, 0), ("read", 9, 1)]


def test_values_are_spilled_only_around_phases_with_load_slots_that_do_not_consume_them() -> None:
    problem = example_problem()
    two_reads = replace(
        problem,
        values=(replace(problem.values[0], consumers=("refine", "denoise")), problem.values[1]),
    )
    assert broken_rules(COLD, two_reads) == [("spill", 2, 1), ("restore", 4, 2)], (
        "refine consumes it too, so there is no gap"
    )
    pipeline_code = replace(
        problem,
        phases=(problem.phases[0], replace(problem.phases[1], uses=()), *problem.phases[2:]),
    )
    text = COLD.replace(
        "slot refine/0:up load\n  drop te\n  spill embeds\n  load up all from pinned\n", ""
    )
    text = text.replace("refine/0:up", "refine/0:").replace(
        "  drop up\n  evict up all\n  restore embeds\n", "  drop te\n"
    )
    assert broken_rules(text, pipeline_code) == []
    assert broken_rules(
        text.replace("  read dit\n", "  spill embeds\n  read dit\n"), pipeline_code
    ) == [("spill", 2, 0)]


def smallest_budget(kind: str, text: str, **changes: object) -> int:
    """The least budget of ``kind`` with which the plan is valid."""
    low, high = 0, 2**20
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if not broken_rules(text, example_problem(**{kind: middle}, **changes))
            else (middle + 1, high)
        )
    return low


def test_host_budgets_are_exact_to_the_byte() -> None:
    te, up_bytes, dit, vae = 2 * K, 2 * K, 9 * K, 3 * K
    # while dit is read: its transient bytes, and embeds, which is spilled
    peak_bytes = up_bytes + dit + vae + 512 + 100
    assert smallest_budget("ram_bytes", COLD) == peak_bytes
    (violation,) = check(
        example_problem(ram_bytes=peak_bytes - 1),
        plan_for(example_problem(ram_bytes=peak_bytes - 1), COLD),
    )
    assert (violation.rule, violation.slot) == ("ram", 3)
    assert (
        violation.detail
        == f"{up_bytes} up + {dit} dit + {vae} vae + 100 dit (transient) + 512 embeds"
        f" = {peak_bytes} bytes on the host > {peak_bytes - 1}"
    )
    assert smallest_budget("pinned_bytes", COLD) == up_bytes + dit + vae, (
        "te is pageable, and so are spilled values and transients"
    )
    assert broken_rules(COLD, example_problem(pinned_bytes=up_bytes + dit + vae - 1)) == [
        ("pinned", 3, -1)
    ]
    disk = {"runs": 3}
    assert smallest_budget("ram_bytes", SESSION, **disk) == te + up_bytes + 4 * K + vae + 500, (
        "bounce buffer of dit; activation of encode on the CPU"
    )
    assert smallest_budget("pinned_bytes", SESSION, **disk) == up_bytes + 4 * K + vae
    assert smallest_budget("disk_bytes", SESSION, **disk) == 9 * K
    assert broken_rules_in_session(disk_bytes=9 * K - 1) == [("disk", -1, -1)]
    assert broken_rules(COLD, example_problem(disk_bytes=0)) == [], (
        "only the chosen variant is stored"
    )


def test_a_value_is_in_ram_also_in_the_slot_that_restores_it() -> None:
    read_late = COLD.replace("  read dit\n  load dit unblocked[0] from pinned\n", "").replace(
        "  restore embeds\n  load dit big[0] from",
        "  restore embeds\n  read dit\n  load dit big[0] unblocked[0] from",
    )
    dit, transient_bytes, vae, embeds = 9 * K, 100, 3 * K, 512
    assert smallest_budget("ram_bytes", read_late) == dit + transient_bytes + vae + embeds


def test_unused_components_take_no_host_memory() -> None:
    problem = example_problem()
    spare = replace(
        problem.components[1],
        name="spare",
        variants=(replace(problem.components[1].variants[0], host_bytes=2**30, stored_bytes=9),),
    )
    with_it = replace(
        problem,
        components=(*problem.components, spare),
        ram_bytes=2**20,
        disk_bytes=0,
        pinned_bytes=2**20,
    )
    assert broken_rules(COLD, with_it) == []


def test_a_component_that_the_chosen_option_does_not_use_takes_no_disk() -> None:
    problem = example_problem(disk_bytes=0)
    *components, vae = problem.components
    spare = replace(vae, name="spare", variants=(replace(vae.variants[0], stored_bytes=9),))
    *phases, decode = problem.phases
    decode = replace(decode, uses=(*decode.uses, replace(decode.uses[0], component="spare")))
    problem = replace(problem, components=(*components, vae, spare), phases=(*phases, decode))
    assert broken_rules(COLD, problem) == []
    assert ("disk", -1, -1) in broken_rules(COLD.replace("option decode tiling\n", ""), problem)


def test_a_spilled_value_is_off_the_device_only_between_its_two_load_slots() -> None:
    problem = example_problem(
        values=(replace(example_problem().values[0], nbytes=12 * K), example_problem().values[1])
    )
    rules = {
        v.slot: v.detail
        for v in check(
            replace(problem, budget_bytes=0), plan_for(replace(problem, budget_bytes=0), COLD)
        )
    }
    values = [int(rules[slot].split(" activation + ")[1].split()[0]) for slot in (2, 3, 4, 5)]
    assert values == [12 * K, 0, 12 * K + 100, 12 * K + 100]
    without_spill = COLD.replace("  spill embeds\n", "").replace("  restore embeds\n", "")
    rules = {
        v.slot: v.detail
        for v in check(
            replace(problem, budget_bytes=0),
            plan_for(replace(problem, budget_bytes=0), without_spill),
        )
    }
    assert int(rules[3].split(" activation + ")[1].split()[0]) == 12 * K


def test_no_value_is_spilled_where_device_and_host_share_memory() -> None:
    problem = example_problem()
    unified = replace(problem, hardware=replace(problem.hardware, device="cpu"))
    assert broken_rules(COLD, unified) == [("spill", 2, 1), ("restore", 4, 2)]


def test_a_component_on_the_cpu_has_its_activation_in_ram() -> None:
    problem = example_problem(budget_bytes=0)
    assert 1 not in {v.slot for v in check(problem, plan_for(problem, COLD))}
    problem = example_problem(budget_bytes=0, runs=3)
    assert [v.slot for v in check(problem, plan_for(problem, SESSION)) if v.rule == "vram"][
        0
    ] == 1, "up is loaded beside it"
    large = example_problem(
        phases=(
            replace(example_problem().phases[0], first_bytes=2**20),
            *example_problem().phases[1:],
        ),
        ram_bytes=2**20,
    )
    assert broken_rules(COLD, large) == [("ram", 1, -1)]


AGAIN = SESSION.index("again")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (SESSION[:AGAIN], [("structure", -1, -1)]),
        (
            SESSION.replace("slot end\n  evict vae all\nagain", "slot end\nagain"),
            [("baseline", 9, -1)],
        ),
        (
            SESSION[:AGAIN] + SESSION[AGAIN:].replace("steady x3", "steady x2"),
            [("structure", 16, -1)],
        ),
        (
            SESSION[:AGAIN] + SESSION[AGAIN:].replace("te load\n", "te load\n  read te\n"),
            [("read", 10, 0)],
        ),
        (
            SESSION[:AGAIN].replace("  read te\n", "")
            + SESSION[AGAIN:].replace("te load\n", "te load\n  read te\n"),
            [("host-missing", 1, -1), ("read", 10, 0), ("host-missing", 11, -1)],
        ),
        (
            SESSION.replace("slot decode/0:vae load\n", "slot decode/0:vae load\n  drop te\n", 1),
            [("drop", 7, 0)],
        ),
        (SESSION + "  evict up all\n", [("baseline", 19, -1)]),
        (
            SESSION[:AGAIN] + SESSION[AGAIN:].replace("  evict vae all\n", ""),
            [("baseline", 19, -1)],
        ),
        (SESSION[:AGAIN].replace("  load up all from pinned\n", ""), [("structure", -1, -1)]),
    ],
)
def test_rules_of_a_session(text: str, rules: list[tuple[str, int, int]]) -> None:
    assert broken_rules_in_session(text) == rules


def test_a_cold_run_has_no_further_runs_and_leaves_nothing_on_the_device() -> None:
    assert broken_rules(SESSION) == [("structure", -1, -1)]
    assert broken_rules(SESSION[:AGAIN]) == [("baseline", 9, -1)] * 2, (
        "up, and the remainder of dit"
    )


def test_an_immovable_component_stays_on_the_device_between_runs() -> None:
    problem = example_problem(runs=3)
    vae = replace(
        problem.components[3], variants=(replace(problem.components[3].variants[0], movable=False),)
    )
    stuck = replace(problem, components=(*problem.components[:3], vae))
    assert broken_rules(SESSION, stuck) == [("immovable", 9, 0), ("immovable", 19, 0)]
    assert set(details(SESSION, stuck)) == {"vae must stay on the device in all runs"}
    load = "slot decode/0:vae load\n  load vae all from pinned\n"
    stays = SESSION.replace("  evict vae all\n", "").replace(
        "leaves up all", "leaves up all\nleaves vae all"
    )
    position = stays.rindex(load)
    assert (
        broken_rules(
            stays[:position] + stays[position:].replace(load, "slot decode/0:vae load\n"), stuck
        )
        == []
    )


def test_directives_hold_across_runs() -> None:
    rules_with_drop = broken_rules_in_session(directives=(Directive("drop", "up"),))
    assert ("drop", 1, -1) in rules_with_drop
    assert ("drop", 10, -1) in rules_with_drop
    assert broken_rules_in_session(directives=(Directive("keep", "up"),)) == []
