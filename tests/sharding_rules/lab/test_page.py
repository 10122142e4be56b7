"""The page: whole, escaped, alone; and, where a browser is installed, drawn without an error."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lab_report
import pytest
from lab_report import GIB, MIB

from sharding_rules.lab.fixes import Fix
from sharding_rules.lab.lint import Finding
from sharding_rules.lab.page import page
from sharding_rules.lab.report import Location, Report
from sharding_rules.lab.summary import matrix

FINDING = Finding(
    "f32 collective",
    402 * MIB,
    Location("loss", "forward", "loss.py:31"),
    "moves f32 in a bf16 program",
    "cast it before",
)
VOID = {"meta", "br", "link"}
HOSTILE = "\"'><script>alert(1)</script>&lt;"


class Tree(HTMLParser):
    """Fails where an element is not closed in order, and counts elements and classes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (
            f"an attribute twice in {tag}: {attrs}"
        )
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def of(self, tag: str, cls: str = "") -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.seen
            if name == tag and (not cls or cls in (attrs.get("class") or "").split())
        ]


def whole(report: Report | None = None) -> str:
    report = report or lab_report.report()
    fixes = [
        Fix("remat", "--config.model.remat=full", lab_report.report(), 6 * GIB, 1.21),
        Fix("rule", "embed", report, GIB, None),
    ]
    return page(
        report,
        [FINDING, dataclasses.replace(FINDING, severity="notice", bytes=0)],
        fixes,
        [("parameters", "174.6 B")],
    )


def test_the_page_says_it_all() -> None:
    tree = Tree(whole())
    for words in (
        "Fits, 70.84 GiB free.", "8.30 GiB of 79.14 GiB",
        "A step takes 6.01 to 9.02 s (predicted, never measured), of which 1.5 s (25 %) wait for the "
        "network at the optimistic rates; MFU 3 to 4 %.",
        "most uncertain: NVLink at 0.7 to 0.78 of its peak (assumed)",
        "1,024 x H100", "data 8 x fsdp 16 x tensor 8", "174.6 B", "2 findings", "params 1.69 2 %",
        "2 x bf16[12288,6144]",
        "state.params.blocks.mlp.up.weight, sharded over fsdp+tensor", "network, 16 devices",
        "316.34 GiB",
        "reduce-scatter bf16[2,2048,12288]",
        "384 x 11.7 ms = 4.49 s, 75 % of the step, 25 % of it waiting",
        "335.0 TFLOP on each device", "moves f32 in a bf16 program",
        "cast it before", "--config.model.remat=full remat 6.00 8.30 x 1.21 fits", "3 arrays",
        "jaxlib 0.10.2",
    ):  # fmt: skip
        assert words in tree.text, words


def test_the_charts_are_drawn_to_scale() -> None:
    tree = Tree(whole())
    shares = tree.of("rect", "share")
    memory = [
        float(str(one["width"]).rstrip("%")) for one in shares if "of HBM" in str(one["data-tip"])
    ]
    report = lab_report.report()
    assert len(memory) == 7 and sum(memory) == pytest.approx(
        100 * report.peak_bytes / report.hbm, abs=0.01
    )
    # what runs once in a step is too short to draw
    assert report.timeline and len(tree.of("svg", "schedule")) == 2
    assert len(tree.of("rect", "span")) == sum(
        len(span.loops) == 2 for span in report.timeline.spans
    )
    step = [
        float(str(one["width"]).rstrip("%"))
        for one in shares
        if "waiting for the network" in str(one["data-tip"])
    ]
    assert sum(step) == pytest.approx(25, abs=0.2)
    assert all(
        0 <= float(str(one["x"]).rstrip("%")) <= 100.01 for one in tree.of("rect") if "x" in one
    )


def test_the_table_adds_up_to_the_wire() -> None:
    report = lab_report.report()
    rows = Tree(whole()).of("tr")
    listed = [one for one in rows if "data-axis" in one]
    assert len(listed) == len(report.collectives) - 1  # all but the scalar
    cells = re.findall(r'<td class="n behind" data-value="([^"]+)"', whole())
    sent = sum(report.wire_bytes(axis) for axis in report.mesh)
    assert sum(map(float, cells)) == pytest.approx(sent / GIB)


def test_upper_bounds_are_marked() -> None:
    report = lab_report.report()
    bounded = dataclasses.replace(report.collectives[0], conditional=True, bounded=True)
    assert "≤ 384" in Tree(whole(dataclasses.replace(report, collectives=(bounded,)))).text
    assert "≤ 384" not in Tree(whole()).text


def test_each_row_has_its_time() -> None:
    """384 runs of 1 ms, of which 250 µs in a step are exposed: in the row, and with those of all
    others in the foot."""
    text = Tree(whole()).text
    assert re.search(r"attention forward 384 96\.0 31\.50 384\.0 0\.2", text), text[3000:5000]
    report = lab_report.report()
    n = len(report.collectives) - 1
    total = sum(one.times for one in report.collectives if one.payload > 4)
    assert f"{total:,.1f} {0.25 * n:.1f}" in text


def test_the_matrix_adds_up_to_the_wire() -> None:
    report = lab_report.report()
    cells = matrix(report)
    assert next(iter(cells)) == (("tensor",), "attention") and len(cells) == 6
    total = sum(row.wire for by_phase in cells.values() for row in by_phase.values())
    assert total == pytest.approx(
        sum(c.times * c.wire for c in report.collectives if c.payload > 4)
    )
    text = Tree(whole()).text
    assert (
        "over part forward, GiB recompute, GiB backward, GiB optimizer, GiB ms ms exposed" in text
    )
    # five collectives, a ms and 384 times each
    assert "tensor attention 63.00 31.50 63.00 1,920.0 1.2" in text


def test_nothing_is_fetched() -> None:
    text = whole()
    assert not re.search(r"https?:|src=|url\(|@import|<link", text)


def test_hostile_names_stay_text() -> None:
    def spoil(value: Any, name: str = "") -> Any:
        """Every text of a report, and the keys of its tables, hostile."""
        if isinstance(value, dict):
            tables = ("mesh", "axis_nodes", "flops", "versions", "options")
            return {key + HOSTILE * (name in tables): spoil(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [spoil(one) for one in value]
        return value + HOSTILE if isinstance(value, str) and name != "stream" else value

    plain = lab_report.report(
        kernels=(("k", ("f32[1]",), Location("p", "forward")),), warnings=("w",), options={"o": 1}
    )
    report = Report.from_json(json.dumps(spoil(json.loads(plain.to_json()))))
    finding = Finding(HOSTILE, 1, Location(HOSTILE), HOSTILE, HOSTILE)
    text = page(report, [finding], [Fix(HOSTILE, HOSTILE, report, 1, 1.0)], [(HOSTILE, HOSTILE)])
    tree = Tree(text)
    assert (
        len(tree.of("script")) == 1
        and "<script>alert" not in text
        and tree.text.count("alert(1)") > 100
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"collectives": ()},
        {"timeline": None},
        {"flops": {}},
        {"hbm": 0, "target": ""},
        {"hbm": GIB},
        {"arguments": ()},
    ],
    ids=lambda changes: next(iter(changes)) + str(len(str(changes))),
)
def test_a_page_without(changes: dict[str, Any]) -> None:
    report = lab_report.report(**changes)
    text = Tree(page(report)).text
    assert "No findings." in text and (
        "does not fit" if not report.fits else "gpt_175b"
    ) in text.replace("Does", "does")


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium here")
def test_in_a_browser(tmp_path: Path) -> None:
    """Opened from a file: no error on the console, the script ran to its end, charts have a size, a
    filter and a sort work."""
    probe = """<script>
      document.querySelector('.chips [data-axis="fsdp"]').click();
      const table = document.querySelector("#network table.collectives"), rows = () => [...table.tBodies[0].rows];
      const out = document.documentElement.dataset;
      out.shown = rows().filter((row) => !row.hidden).length;
      out.sum = table.tFoot.rows[0].cells[8].textContent;
      table.tHead.rows[0].cells[6].click(); table.tHead.rows[0].cells[6].click();
      out.sorted = rows().every((row, i, all) => !i || Number(all[i - 1].cells[6].dataset.value) <= Number(row.cells[6].dataset.value));
      out.drawn = [...document.querySelectorAll("rect.span")].filter((one) => one.getBoundingClientRect().width > 0).length;
      document.querySelector("rect.span").dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 5, clientY: 5 }));
      out.tip = document.getElementById("tip").textContent.split("\\n")[0];
      out.wide = document.documentElement.scrollWidth;
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(whole().replace("</body>", probe), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,800",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [
        str(BROWSER),
        *flags,
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
        file.as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in ran.stderr, [
        line for line in ran.stderr.splitlines() if "CONSOLE" in line
    ]
    root = Tree(ran.stdout).of("html")[0]
    spans = len(re.findall('class="span ', whole()))
    expected = {
        "ready": "yes",
        "shown": "8",
        "sum": "177.19",
        "sorted": "true",
        "drawn": str(spans),
        "tip": "all-gather-start.1",
    }
    assert {name: root.get(f"data-{name}") for name in expected} == expected
    assert int(root["data-wide"] or 0) <= 1280  # nothing sticks out
