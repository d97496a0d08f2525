"""The HTML page of a run: its content, and that a browser shows it on large and small screens
without network."""

from __future__ import annotations

import base64
import html
import io
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from graphrun.report.memory import parts_of
from graphrun.report.page import Made, product_from_trace
from graphrun.report.svg import round_ticks
from graphrun.solve.solve import solve

GRAPHS = Path(__file__).parents[2] / "graphs"
SCREENSHOTS = Path(__file__).parents[2] / "out"  # to be looked at
BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)

# Writes what a browser made of the page into the page, where --dump-dom shows it.
PROBE = """<script>document.body.dataset.seen = [document.documentElement.scrollWidth <= innerWidth,
 document.querySelectorAll('svg rect').length, \
getComputedStyle(document.body).backgroundColor].join('|')</script></body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Pages of a run of the tiny FLUX and of its plan alone."""
    from typer.testing import CliRunner

    from graphrun.cli.main import app

    folder = tmp_path_factory.mktemp("pages")
    plan, trace, run, plan_page = (
        folder / name for name in ("plan.json", "trace.json", "run.html", "plan.html")
    )
    options = ["--vram", "6M", "--ram", "1G", "--device", "sim", "--output", str(folder / "a.png")]
    for arguments in (
        [
            "run",
            str(GRAPHS / "flux-tiny.yaml"),
            *options,
            "--reuse",
            "none",
            "--plan",
            str(plan),
            "--trace",
            str(trace),
        ],
        ["report", str(trace), "-o", str(run)],
        ["report", str(plan), "-o", str(plan_page)],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    return run, plan_page


@pytest.mark.sweep("more")
def test_the_page_shows_the_picture_and_what_it_was_made_of(pages: tuple[Path, Path]) -> None:
    page = pages[0].read_text()
    (picture,) = re.findall(r'<img alt="output" src="data:image/jpeg;base64,([^"]+)">', page)
    assert Image.open(io.BytesIO(base64.b64decode(picture))).size == (128, 128)
    entries = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert entries["prompt"] == "a lighthouse at dusk"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d.*", entries["made"])
    assert "seed 0" in entries["inputs"]
    assert {"graphrun", "torch", "diffusers"} <= {
        pair.split()[0] for pair in entries["versions"].split(", ")
    }
    assert re.fullmatch("[0-9a-f]{16}", entries["plan"])
    assert "<img" not in pages[1].read_text()


def test_a_picture_that_is_gone_or_broken_is_left_out(tmp_path: Path) -> None:
    record = {
        "inputs": {"prompt": "x"},
        "versions": {},
        "plan": "0",
        "date": "now",
        "files": ["gone.png", "broken.png", "a.wav"],
    }
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "a.wav").touch()
    assert product_from_trace({"made": record}, tmp_path) == Made(
        {"prompt": "x"}, {}, "0", "now", []
    )


def test_pictures_outside_the_folder_of_a_trace_are_named_and_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    (folder / "below").mkdir(parents=True)
    for path in (tmp_path / "private.png", folder / "a.png", folder / "below" / "b.png"):
        Image.new("RGB", (8, 8)).save(path)
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    outside_names = "../private.png", str(tmp_path / "private.png"), "link.png"

    def made_of(files: Sequence[str]) -> Made:
        product = product_from_trace(
            {"made": {"inputs": {}, "versions": {}, "plan": "0", "date": "now", "files": [*files]}},
            folder,
        )
        assert product is not None
        return product

    assert made_of(outside_names) == Made({}, {}, "0", "now", [], outside_names)
    mixed = made_of(["a.png", "below/b.png", outside_names[0]])
    assert (len(mixed.pictures), mixed.outside_names) == (2, outside_names[:1])


def test_the_parts_of_a_slot_are_its_peak(make_problem: Any) -> None:
    solution = solve(make_problem("flux-tiny", 6 * 2**20))
    for parts, report in zip(parts_of(solution), solution.simulation.slots, strict=True):
        kinds = {
            kind: sum(part.nbytes for part in parts if part.kind == kind)
            for kind in ("weights", "ring_buffer", "activation", "values")
        }
        assert list(kinds.values()) == [
            report.resident_bytes,
            report.ring_buffer_bytes,
            report.activation_bytes,
            report.values_bytes,
        ]


def test_ticks_are_round() -> None:
    assert round_ticks(46.4) == [0, 10, 20, 30, 40]
    assert round_ticks(0.9, 3) == pytest.approx([0, 0.5])
    assert round_ticks(7.37, 3) == [0, 5]
    assert round_ticks(6) == [0, 2, 4, 6]


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_the_page_of_a_run_shows_plan_and_measurement_side_by_side(
    pages: tuple[Path, Path],
) -> None:
    page = pages[0].read_text().replace("<wbr>", "")
    assert [re.sub("<.*?>", "", h) for h in re.findall("<h2>.*?</h2>", page)] == [
        "Planned",
        "Measured",
        "Phases",
        "Planned against measured",
        "Time against budget",
    ]
    assert "flux-tiny on sim within 6.00 MiB" in page
    for phase in (
        "encode/0:text_encoder",
        "encode/1:text_encoder_2",
        "denoise/0:transformer",
        "decode/0:vae",
    ):
        assert f"<td>{phase}</td>" in page
        assert f"<td>{phase} first</td>" in page
    assert "left on the device: 0 B" in text_of(page)
    assert page.count('class="budget"') == 4, (
        "in the legend, over both timelines' memory, and where this budget is among others"
    )
    assert " MiB</text>" in page.rpartition("<svg")[2], "sizes are in a unit that suits them"
    assert "slot denoise/0:transformer steady x3" in text_of(page)


def test_the_page_of_a_plan_has_nothing_measured(pages: tuple[Path, Path]) -> None:
    page = pages[1].read_text()
    assert "easured" not in text_of(page).replace("basis measured", "")
    assert "Time against budget" in page


def test_the_page_needs_no_network(pages: tuple[Path, Path]) -> None:
    for page in pages:
        addresses = re.findall(r"(?:src|href|url)\s*[=(]\s*['\"]?([^'\")\s>]+)", page.read_text())
        assert [name for name in addresses if not name.startswith(("#", "data:image/jpeg"))] == []
        assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.sweep("more", sample=2)
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize(
    ("width", "dark"), [(1100, False), (1100, True), (390, False), (390, True)]
)
def test_a_browser_shows_it(
    pages: tuple[Path, Path], tmp_path: Path, width: int, dark: bool
) -> None:
    page = pages[0].read_text()
    probe_page = tmp_path / "page.html"
    probe_page.write_text(page.replace("</body>", PROBE))
    SCREENSHOTS.mkdir(exist_ok=True)
    picture = SCREENSHOTS / f"report-{width}{'-dark' if dark else ''}.png"
    picture.unlink(missing_ok=True)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},1700",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    dom = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", probe_page.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout
    match = re.search(r'data-seen="([^"]*)"', dom)
    assert match, dom[-2000:]
    fits, bars, paper = html.unescape(match[1]).split("|")
    assert fits == "true"
    assert int(bars) == page.count("<rect")
    assert paper == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
    subprocess.run(
        [str(BROWSER), *options, f"--screenshot={picture}", pages[0].as_uri()],
        capture_output=True,
        timeout=600,
        check=True,
    )
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_is_no_trace_is_refused(
    graphrun: Callable[..., tuple[int, str, str]], tmp_path: Path, pages: tuple[Path, Path]
) -> None:
    code, output, err = graphrun("report", str(tmp_path / "none.json"))
    assert (code, output) == (2, "")
    assert "no such file" in err
    damaged = tmp_path / "trace.json"
    damaged.write_text(
        (pages[0].parent / "trace.json").read_text().replace('"start_seconds"', '"start"')
    )
    code, output, err = graphrun("report", str(damaged))
    assert (code, output) == (2, "")
    assert "is a damaged trace (KeyError 'start_seconds'): write it again" in err
    assert not (tmp_path / "report.html").exists()
