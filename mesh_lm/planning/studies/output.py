"""A study as files: a CSV of each table, a PNG of each picture, and one page that needs no other
file.

Pictures need matplotlib. Without it there are tables, and a line that says so.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from mesh_lm.errors import ConfigError
from sharding_rules.lab.markup import Number, document, section, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
NO_MATPLOTLIB = "no pictures: matplotlib is not installed (pip install matplotlib)"
_STYLE = "<style>figure img{max-width:100%;height:auto;background:#fff}pre{overflow-x:auto}</style>"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture that is not drawn yet."""

    name: str
    """The name of the file, without .png."""
    caption: str
    """What it shows, in a sentence."""
    draw: Callable[[], Figure]


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's rows, and the pictures of them."""

    name: str
    """The name of the page, without .html."""
    title: str
    sentences: Sequence[str]
    """What the study found, and on what it rests."""
    command: str
    """The command that makes it."""
    tables: Mapping[str, Sequence[Any]]
    """Name of a CSV file, without .csv -> NamedTuples of one type. Without rows it is left out."""
    pictures: Sequence[Picture] = ()


def has_matplotlib() -> bool:
    """Returns whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def write(study: Study, directory: str) -> Iterator[str]:
    """Writes a study into a directory, which it makes, and yields a line for each file.

    Raises ConfigError if a file cannot be written.
    """
    folder = Path(directory).expanduser()
    for name, rows in study.tables.items():
        if rows:
            yield _write(folder / f"{name}.csv", csv_text(rows).encode())
    pngs: dict[str, bytes] = {}
    if has_matplotlib():
        for picture in study.pictures:
            pngs[picture.name] = png(picture.draw())
            yield _write(folder / f"{picture.name}.png", pngs[picture.name])
    elif study.pictures:
        yield NO_MATPLOTLIB
    yield _write(folder / f"{study.name}.html", page(study, pngs).encode())


def require_folder(directory: str) -> None:
    """Makes the directory. Raises ConfigError if it, or a file in it, cannot be written."""
    _write(Path(directory).expanduser() / ".writable", b"")
    (Path(directory).expanduser() / ".writable").unlink()


def _write(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write the study to {path}: {error.strerror}") from error
    return f"wrote {path}"


def csv_text(rows: Sequence[Any]) -> str:
    """Returns NamedTuples of one type as CSV, with their fields as the first line.

    Numbers have six significant digits; None is empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0]._fields)
    for row in rows:
        writer.writerow([_cell(value) for value in row])
    return text.getvalue()


def read_csv(text: str, cls: type[T]) -> list[T]:
    """Returns the rows that `csv_text` has written, with its rounded numbers.

    cls: the NamedTuple, of str, int, float and bool, or of these and None.
    """
    hints = get_type_hints(cls)
    rows = []
    for words in csv.DictReader(io.StringIO(text)):
        values = {name: _parsed(word, hints[name]) for name, word in words.items()}
        rows.append(cls(**values))
    return rows


def _parsed(word: str, hint: Any) -> Any:
    """Returns the text of a cell as a value of its type."""
    kinds = get_args(hint) or (hint,)
    if str in kinds:
        return word
    if not word:
        return None
    if bool in kinds:
        return word == "True"
    return int(word) if int in kinds else float(word)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    return str(value)


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG without the name and version of the program that drew it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content, metadata={"Software": None})
    return content.getvalue()


def page(study: Study, pngs: Mapping[str, bytes]) -> str:
    """Returns the page of a study with its pictures in it. Everything from the study is escaped.

    pngs: the pictures that were drawn, by name.
    """
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in study.sentences)
    command = f"<pre><code>{escape(study.command)}</code></pre>"
    head = f"{_STYLE}<header>\n<h1>{escape(study.title)}</h1>\n{sentences}{command}</header>"
    sections = []
    for picture in study.pictures:
        if picture.name in pngs:
            body = _figure(picture, pngs[picture.name])
            sections.append(section(picture.name, escape(picture.caption), body))
    for name, rows in study.tables.items():
        if rows:
            sections.append(section(f"table-{name}", escape(f"{name}.csv"), _table(rows)))
    return document(study.title, head, "".join(sections), "<footer></footer>")


def _figure(picture: Picture, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    alternative = escape(picture.caption, quote=True)
    return f'<figure><img alt="{alternative}" src="data:image/png;base64,{data}"></figure>'


def _table(rows: Sequence[Any]) -> str:
    lines = []
    for row in rows:
        lines.append([_html_cell(value) for value in row])
    return table([escape(field) for field in rows[0]._fields], lines)


def _html_cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return Number(value, show=shown)
    return escape("" if value is None else str(value))
