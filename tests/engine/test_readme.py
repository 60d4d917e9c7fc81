"""README's table of patches says what the catalogue says. ``python -m tests.engine.test_readme`` writes it anew."""

from __future__ import annotations

from overlay.catalog import load_catalog
from tests.support import ROOT

BEGIN, END = "<!-- patches: kept in step by tests/engine/test_readme.py -->\n", "<!-- /patches -->"


def table() -> str:
    rows = ["| patch | for | class | default | state |", "| --- | --- | --- | --- | --- |"]
    for name, entry in load_catalog().items():
        patch = entry.patch
        where = entry.file.relative_to(ROOT)
        rows.append(
            f"| [`{name}`]({where}) {patch.summary} | {entry.file.parent.name} | {patch.exactness.value} "
            f"| {'on' if patch.default else 'off'} | {patch.verified} |"
        )
    return "\n".join(rows) + "\n"


def test_the_table_of_patches_is_the_catalogue():
    text = (ROOT / "README.md").read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), "run: python -m tests.engine.test_readme"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    content = readme.read_text()
    start, end = content.index(BEGIN) + len(BEGIN), content.index(END)
    readme.write_text(content[:start] + table() + content[end:])
