"""What the site has beside docs/: the README and its neighbours and the notebooks as pages, and the
files that pages link to."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FILES = "files"
"""Where a linked file of the repository lies on the site."""
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""A page outside docs/ -> its address on the site."""
_LINK = re.compile(r"(\]\(|src=\")([^)\s\"#:]+)((?:#[^)\"]*)?[)\"])")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/, and every other file of the repository that a page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for source, uri in PAGES.items():
        texts[source] = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=for_site(texts[source], source)))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        source = f"docs/{file.src_uri}"
        texts[source] = notebook_text(json.loads(file.content_string))
        download = f"[Download this notebook]({posixpath.basename(source)})\n"
        files.append(
            File.generated(
                config, address(source), content=for_site(texts[source], source) + download
            )
        )
    for source, text in texts.items():
        for _, target, _ in _LINK.findall(_prose(text)):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            if (
                (uri := address(path)).startswith(f"{FILES}/")
                and not files.get_file_from_path(uri)
                and (ROOT / path).is_file()
            ):
                files.append(File.generated(config, uri, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page of docs/ with its links as they are on the site. Pages that are made here have them
    already."""
    return markdown if page.file.generated_by else for_site(markdown, f"docs/{page.file.src_uri}")


def on_page_context(context: Any, page: Any, **_: Any) -> Any:
    """Pages that are made here have no link that edits them: the address that MkDocs guesses does
    not exist."""
    if page.file.generated_by:
        page.edit_url = None
    return context


def on_page_content(html: str, **_: Any) -> str:
    """A page with its tables able to wrap after a plus sign, as in "fsdp+megatron_sp", which
    browsers take for one word."""
    return re.sub(
        r"<t([hd])\b[^>]*>.*?</t\1>",
        lambda cell: re.sub(r"\+(?=\w)(?![^<]*>)", "+<wbr>", cell[0]),
        html,
        flags=re.S,
    )


def notebook_text(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: each cell of code in a block, and what it printed and plotted below
    it."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    '<img alt="What the cell above plots" '
                    f'src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
                )
            else:
                printed = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"``` {{ .text .output }}\n{printed.rstrip()}\n```")
    return "\n\n".join([*parts, ""])


def for_site(text: str, source: str) -> str:
    """The text of a page, with links as they are on the site. source: its path in the
    repository."""
    here = posixpath.dirname(address(source))

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return match[1] + posixpath.relpath(address(path), here or ".") + match[3]

    code = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.M | re.S)
    parts = code.split(text)
    return "".join(part if n % 2 else _LINK.sub(link, part) for n, part in enumerate(parts))


def address(path: str) -> str:
    """Where a file of the repository is on the site. A file of text that is no page is shown by
    browsers as text."""
    if path in PAGES:
        return PAGES[path]
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    inside = path.removeprefix("docs/")
    if inside != path and not inside.endswith(".py"):
        return inside
    return (
        f"{FILES}/{path}.txt"
        if Path(path).suffix in (".py", ".md", ".cff", "")
        else f"{FILES}/{path}"
    )


def _prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", text, flags=re.M | re.S)
