"""The site: it builds without a warning, its notebook runs, and every link in it leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.launch import warm_python

import trainer
from trainer.config import typed

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Fails with every warning of Sphinx, and with a notebook's error."""
    for name in ("sphinx", "myst_nb", "furo"):
        assert importlib.util.find_spec(name), f"{name} is not installed: bash launch/setup.sh"
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHON_EXEC": warm_python(),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
    }
    options = ["-W", "--keep-going", "-q", "-c", "docs", "-d", folder / "doctrees", ".", folder / "html"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


class Links(HTMLParser):
    """What a page refers to, and the places in it that can be referred to."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.places.update(filter(None, (given.get("id"), given.get("name"))))
        if target := given.get("href") if tag in ("a", "link") else given.get("src"):
            (self.targets if tag == "a" else self.loaded).append(target)


def test_links_of_the_site(site: Path):
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    problems = []
    for page, links in pages.items():
        for target in links.targets + links.loaded:
            parts = urlsplit(target)
            if parts.scheme:
                if target in links.loaded and parts.scheme != "data":
                    problems.append(f"{page.name} loads {target}: a page is whole without a network")
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = unquote(parts.fragment)
            if not path.exists() or path in pages and place not in pages[path].places:
                problems.append(f"{page.name}: {target}")
    assert not problems, "\n".join(problems)


def test_the_search_leads_to_every_setting(site: Path):
    """The search looks a word up in the entries of the index, before the text of pages."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    page, entries = index["docnames"].index("docs/settings"), index["indexentries"]
    places = Links(site / "docs/settings.html").places
    missing = [
        one.path
        for one in typed.list_settings()
        if [page, one.path, False] not in entries.get(one.path, []) or one.path not in places
    ]
    assert not missing


def test_every_page_is_in_the_site(site: Path):
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *NOTEBOOKS]
    assert len(sources) > 20
    missing = [path for path in sources if not (site / path.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert not missing


def test_notebook_draws(site: Path):
    page = (site / "examples" / "first_hour.html").read_text()
    assert page.count("<img ") >= 1 and page.count("<iframe") == 1 and "starting 2 processes" in page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path):
    """What they print is made by the build, so that it is what they print now."""
    cells = json.loads(path.read_text())["cells"]
    kept = [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert not kept, f"clear the outputs of {kept}"


def test_python_page_has_all_public_names():
    text = (ROOT / "docs" / "extending.md").read_text()
    missing = [name for name in trainer.__all__ if f":: trainer.{name}\n" not in text]
    assert not missing, f"docs/extending.md says nothing of {missing}"
