"""The documentation site as MkDocs builds it: the API's names, the notebook's outputs, the links to
a repository, and what fits 1280 px."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import notebooks, test_api_pages

ROOT = Path(__file__).parents[2]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
REPOSITORY = "https://example.org/owner/name"
PROBE = """<script>addEventListener("load", () => {
  const parts = document.querySelectorAll(".md-content :is(.md-typeset__scrollwrap, pre > code)");
  const cut = [...parts].filter((part) => part.scrollWidth > part.clientWidth + 1).map((part) => part.textContent.trim().slice(0, 60));
  document.documentElement.dataset.cut = JSON.stringify(cut);
})</script></body>"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(directory)]
    environment = os.environ | {
        "MESH_LM_REPO_URL": REPOSITORY,
        "MESH_LM_EDIT_URI": "edit/main/docs/",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.parametrize("page", sorted(set(test_api_pages.PAGES.values())))
def test_every_name_of_the_api_has_a_heading(site: Path, page: str) -> None:
    anchors = set(
        re.findall(
            r'<h[2-6] id="([^"]+)" class="doc',
            (site / "api" / f"{page}.html").read_text(encoding="utf-8"),
        )
    )
    assert not set(test_api_pages.shown(page)) - anchors


def test_a_notebook_is_shown_with_its_outputs(site: Path) -> None:
    for path in notebooks.NOTEBOOKS:
        text = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert (
            "data:image/png;base64," in text
            and "step 60/60" in text
            and f'href="{path.name}"' in text
        )
        assert (site / "notebooks" / path.name).is_file()


def test_the_repository_is_linked_where_it_is_known(site: Path) -> None:
    text = (site / "lab.html").read_text(encoding="utf-8")
    assert f'href="{REPOSITORY}"' in text and f'href="{REPOSITORY}/edit/main/docs/lab.md"' in text
    # it is the README
    assert "edit/main/docs/index.md" not in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not BROWSER, reason="no Chromium here")
def test_tables_and_commands_fit_1280_pixels(site: Path, tmp_path: Path) -> None:
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,900",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    cut = {}
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        if "<table>" in text or page.name == "index.html":
            probe = page.with_name(f"probe_{page.name}")
            probe.write_text(text.replace("</body>", PROBE), encoding="utf-8")
            command = [
                str(BROWSER),
                *flags,
                "--virtual-time-budget=3000",
                "--dump-dom",
                probe.as_uri(),
            ]
            drawn = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
            found = re.search(r'data-cut="([^"]*)"', drawn)
            assert found, f"{page.name} was not drawn"
            cut[page.name] = json.loads(html.unescape(found[1]))
    assert len(cut) > 10 and not {name: parts for name, parts in cut.items() if parts}
