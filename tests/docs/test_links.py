"""Links of the pages: each leads to a file of the repository and to a heading that it has; the
site's navigation has every page."""

import importlib
import posixpath
import re
import sys
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)|src=\"([^\"]+)\"")


def prose(page: Path) -> str:
    return re.sub(
        r"^ *```.*?^ *```$|`[^`\n]+`",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )


def headings(page: Path) -> set[str]:
    """Their anchors, as GitHub and MkDocs make them."""
    texts = re.findall(
        r"^#+ (.*)$",
        re.sub(
            r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        ),
        re.MULTILINE,
    )
    plain = [unicodedata.normalize("NFKD", text).replace("`", "").lower() for text in texts]
    return {"#" + re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip()) for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor, image in LINK.findall(prose(page)):
        if (target or image).startswith(("http:", "https:")):
            continue
        path = page.parent / (target or image) if target or image else page
        assert path.is_file(), f"{target or image} is no file"
        assert not anchor or anchor in headings(path), f"{target}{anchor}: no such heading"


class Loader(yaml.SafeLoader):
    """Of mkdocs.yml, which may read the environment."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def site() -> tuple[dict, list[str]]:
    """mkdocs.yml, and the pages of its navigation."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def leaves(item: object) -> list[str]:
        children = (
            item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        )
        return (
            [item]
            if isinstance(item, str)
            else [page for child in children for page in leaves(child)]
        )

    return config, leaves(config["nav"])


def test_every_page_is_in_the_navigation(hooks: ModuleType) -> None:
    made = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")} | set(
        hooks.PAGES.values()
    )
    made |= {
        str(path.relative_to(ROOT / "docs").with_suffix(".md"))
        for path in ROOT.glob("docs/**/*.ipynb")
    }
    _, pages = site()
    assert sorted(pages) == sorted(made)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/site_hooks.py, without MkDocs."""
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["mkdocs.structure.files"].__dict__.update(File=object, Files=list)
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("site_hooks")


def test_links_as_they_are_on_the_site(hooks: ModuleType) -> None:
    """From the README and from a page below docs/, to a page, a picture, a file of code; code is
    left alone."""
    text = (
        '[a](docs/lab.md#x) <img src="docs/images/plan.png"> [b](train.py) `[c](docs/lab.md)` '
        "[d](https://e.org)"
    )
    shown = (
        '[a](lab.md#x) <img src="images/plan.png"> [b](files/train.py.txt) `[c](docs/lab.md)` '
        "[d](https://e.org)"
    )
    assert hooks.for_site(text, "README.md") == shown
    assert (
        hooks.for_site("[a](../../README.md) [b](../lab.md)", "docs/tours/a.md")
        == "[a](../index.md) [b](../lab.md)"
    )
    assert (
        hooks.for_site("[a](../notebooks/a.ipynb)", "docs/tours/a.md") == "[a](../notebooks/a.md)"
    )
    assert posixpath.dirname(hooks.address("docs/tours/a.md")) == "tours"


def test_a_notebook_as_a_page(hooks: ModuleType) -> None:
    """Its text, its code in a block, what the code prints in another block, and its plots."""
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "b"]},
        {"cell_type": "code", "source": ["print(1)\n", "plot()"], "outputs": [
            {"output_type": "stream", "text": ["1\n"]},
            {"output_type": "display_data", "data": {"image/png": "iVBO\n", "text/plain": ["<Figure>"]}},
        ]},
    ]  # fmt: skip
    assert hooks.notebook_text({"cells": cells}) == (
        "# A\nb\n\n```python\nprint(1)\nplot()\n```\n\n``` { .text .output }\n1\n```\n\n"
        '<img alt="What the cell above plots" src="data:image/png;base64,iVBO">\n\n'
    )


def test_words_joined_by_a_plus_can_wrap_in_a_table(hooks: ModuleType) -> None:
    row = '<p>a+b</p><td><a href="x+y">zero3+ring</a> 1 + 2</td>'
    assert (
        hooks.on_page_content(row) == '<p>a+b</p><td><a href="x+y">zero3+<wbr>ring</a> 1 + 2</td>'
    )
