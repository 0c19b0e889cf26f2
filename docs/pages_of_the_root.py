"""A hook of MkDocs: pages of the site that are files outside of `docs/`, so that nothing is written down twice.

Links between them are written for readers of the repository. Here they lead to the page of the same file; a link to a
file that is no page becomes plain text.
"""

from __future__ import annotations

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
# Page of the site -> file of the repository.
FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "results.md": "benchmarks/RESULTS.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(docs/([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = FROM_ROOT.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = _IMAGE.sub(r"![\1](\2)", markdown)
    return _LINK.sub(lambda link: _on_site(link[1], link[2], source), markdown)


def _on_site(words: str, target: str, source: str) -> str:
    """The link as the site has it.

    Args:
        words: what is linked.
        target: as written in the repository, relative to `source`.
        source: file of the repository that holds the link.
    """
    if re.match(r"\w+:|#", target):
        return f"[{words}]({target})"
    path, _, anchor = target.partition("#")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = {source: page for page, source in FROM_ROOT.items()}.get(file, file.removeprefix("docs/"))
    if page == file:  # no page of the site
        return f"`{words}`" if "`" not in words else words
    return f"[{words}]({page}{'#' if anchor else ''}{anchor})"
