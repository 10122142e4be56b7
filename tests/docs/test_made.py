"""What the code makes of the pages is what they have: tables, and the answers of docs/errors.md."""

from pathlib import Path

import pytest

from tests.docs import made

AGAIN = "run: python -m tests.docs.made"


@pytest.mark.parametrize("page", made.PAGES)
def test_pages_are_as_made(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.ROOT)
    assert made.made(page) == (made.ROOT / page).read_text(encoding="utf-8"), AGAIN


def test_every_table_is_on_a_page() -> None:
    pages = "".join((made.ROOT / page).read_text(encoding="utf-8") for page in made.PAGES)
    assert sorted(name for _, name, *_ in made._TABLE.findall(pages)) == sorted(made.tables())


def test_another_answer_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong answer, a wrong table and a table that is missing are replaced; prose stays."""
    monkeypatch.chdir(made.ROOT)
    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(made, "ANSWERED", "page.md")
    monkeypatch.setattr(made, "tables", lambda: {"numbers": lambda: "| 1 |"})
    session = ">>> x = [\n...     1]\n>>> x\n{answer}\n\n"
    table = "<!-- table numbers: python -m tests.docs.made -->\n{table}<!-- end of table -->\n"
    page = "Prose.\n\n" + table + "\n```pycon\n" + session + "```\n"
    (tmp_path / "page.md").write_text(page.format(table="", answer="[2]"), encoding="utf-8")
    assert made.made("page.md") == page.format(table="\n| 1 |\n\n", answer="[1]")


def test_what_is_not_refused_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.main", lambda words: 0)
    with pytest.raises(AssertionError, match="is not refused"):
        made.refusal(["--mesh.data=8"])


def test_an_exception_is_shown_without_its_frames() -> None:
    assert (
        made.python_answer("1 / 0\n", {})
        == "Traceback (most recent call last):\n  ...\nZeroDivisionError: division by zero\n"
    )
