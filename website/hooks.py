"""MkDocs' hooks: the README is the site's home page, and what pages link to in the repository is on the site.

Pages keep the links that work on a forge, relative to their place in the repository. Here such a link leads to:

    README.md        the home page
    docs/X           X
    *.md, pictures   the same path
    another file     a page that shows its text
    a folder         a page that lists its programs
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference_pages
from mkdocs.structure.files import File, Files

from fastcoll import __version__

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_START = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
# Searches find the reference, which has no path, and the answers first, and pages for contributors last.
_BOOSTS: dict[str | None, float] = {None: 4, "docs/faq.md": 4}
_LATE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/architecture",
    "docs/failpoints",
    "docs/releasing",
    "docs/robustness",
)


def uri_of(path: str) -> str:
    """Return where the site has a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return path if path.endswith((".md", ".png")) else f"{path}.md"


def targets(path: str, text: str) -> Iterator[str]:
    """Yield the paths of the repository to which the text of the page at `path` links."""
    for link in _LINK.finditer(text):
        yield _resolved(path, link[2])


def _resolved(path: str, link: str) -> str:
    """Return where a link leads in the repository; the links on a folder's page begin in the folder."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    return posixpath.normpath(posixpath.join(folder, link))


def _text_of(path: str) -> str:
    """Return the text of the page for a page, a program, or a folder, whose programs it lists."""
    place = ROOT / path
    if path.endswith(".md"):
        return place.read_text()
    if place.is_dir():
        programs = sorted(each.relative_to(ROOT).as_posix() for each in place.rglob("*.py"))
        lines = [f"- [{each}]({posixpath.relpath(each, path)})" for each in programs]
        return "\n".join([f"# {path}", "", *lines, ""])
    kind = "python" if path.endswith(".py") else "text"
    return f"# {path}\n\n````{kind}\n{place.read_text()}````\n"


def on_config(config: Any) -> Any:
    """Show the version, and links to edit a page only if it is known where the sources are."""
    config.copyright = f"fastcoll {__version__}"
    if not config.repo_url:
        config.repo_url = config.edit_uri = None
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, the pages outside docs/ that others link to, and the reference."""
    for file in files:
        file.edit_uri = f"docs/{file.src_uri}"
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    found = [*_START, *(each for path, text in texts.items() for each in targets(path, text))]
    while found:
        path = found.pop()
        if path in texts or path.startswith("docs/"):
            continue
        if path.endswith(".png"):
            texts[path], source = "", {"abs_src_path": str(ROOT / path)}
        else:
            texts[path] = _text_of(path)
            source = {"content": texts[path]}
            found += [] if path.endswith(".py") else targets(path, texts[path])
        files.append(made := File.generated(config, uri_of(path), **source))
        made.edit_uri = path
    files.append(File.generated(config, "search.js", abs_src_path=str(ROOT / "website/search.js")))
    for uri, content in reference_pages.pages():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make the links relative to the page's place on the site, and rank the page in searches."""
    path = page.file.edit_uri
    late = path is not None and path.startswith(_LATE)
    page.meta["search"] = {"boost": 0.25 if late else _BOOSTS.get(path, 1)}
    if path is None:  # of the reference
        return markdown
    if not path.startswith("docs/") and path not in _START:
        page.meta["search"] = {"exclude": True}
    folder = posixpath.dirname(page.file.src_uri)

    def on_the_site(link: re.Match[str]) -> str:
        target = _resolved(path, link[2])
        return f"{link[1]}{posixpath.relpath(uri_of(target), folder or '.')}{link[3] or ''}"

    parts = re.split(r"(^(`{3,}).*?^\2$)", markdown, flags=re.MULTILINE | re.DOTALL)
    # Of every three parts, the second is a block of code, and the third its fence.
    return "".join(
        part if i % 3 == 1 else _LINK.sub(on_the_site, part) for i, part in enumerate(parts) if i % 3 != 2
    )
