"""Draws plan_NAME.svg (the report on one screen) and plan_NAME.png (its page, without the long
tables; needs Chromium) beside this file.

mesh-lm plan gpt_175b --devices=1024 --output=report.json
python docs/images/plan.py report.json
"""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from sharding_rules.lab.lint_context import Finding, Location
from sharding_rules.lab.page import page
from sharding_rules.lab.report import Report
from sharding_rules.lab.text import screen

HERE = Path(__file__).parent
WIDE, TALL = 1280, 1690
ABRIDGED = """<style>
.chips, #network h3, #network .scroll, #network .note, .wide tbody tr:nth-child(n+9), .wide tfoot { display: none }
</style>"""
BRIGHT = [
    (63, 70, 77),
    (216, 114, 107),
    (108, 199, 154),
    (235, 166, 80),
    (91, 155, 223),
    (171, 138, 214),
    (91, 155, 223),
    (228, 230, 230),
]
THEME = TerminalTheme((21, 24, 27), (228, 230, 230), BRIGHT, BRIGHT)
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="6" fill="#15181b"/>
<g transform="translate({terminal_x}, 26)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    report, facts = Report.from_json(json.dumps(plan["report"])), list(plan["facts"].items())
    findings = [Finding(**{**one, "where": Location(**one["where"])}) for one in plan["findings"]]
    console = Console(width=110, record=True, file=io.StringIO(), force_terminal=True)
    console.print(screen(report, findings, facts=facts))
    to = HERE / f"plan_{report.name}"
    text = console.export_svg(theme=THEME, code_format=SVG, unique_id="plan")
    to.with_suffix(".svg").write_text(
        "\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8"
    )
    photograph(
        page(report, findings, facts=facts).replace("</head>", f"{ABRIDGED}</head>"),
        to.with_suffix(".png"),
    )


def photograph(html: str, to: Path) -> None:
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not browser:
        raise SystemExit("the picture of the page needs Chromium")
    with tempfile.TemporaryDirectory() as scratch:
        (file := Path(scratch) / "page.html").write_text(html, encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--blink-settings=preferredColorScheme=1",
        ]
        flags += [
            f"--window-size={WIDE},{TALL}",
            f"--user-data-dir={scratch}",
            f"--screenshot={scratch}/page.png",
        ]
        subprocess.run([browser, *flags, file.as_uri()], check=True, capture_output=True)
        image = Image.open(f"{scratch}/page.png").convert("RGB")
    ink = (
        image.point([255 if level < 245 else 0 for level in range(256)] * 3).convert("L").getbbox()
    )
    image.crop((0, 0, WIDE, min(TALL, ink[3] + 40) if ink else TALL)).quantize(
        128, dither=Image.Dither.NONE
    ).save(to, optimize=True)


if __name__ == "__main__":
    main()
