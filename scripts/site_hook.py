"""A hook of mkdocs: adds the pages outside docs/ to the site, and resolves links from the repository as GitHub does."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Page of the site: file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "peers.md": "benchmarks/peers.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
SCHEME = re.compile(r"[a-z]+:", re.IGNORECASE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live outside docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page; those of fenced blocks stay."""
    parts = FENCED.split(markdown)  # every second one is a fenced block
    parts[::2] = [LINK.sub(lambda link: rewritten(link, page.file.src_uri), part) for part in parts[::2]]
    return "".join(parts)


def rewritten(link: "re.Match[str]", page: str) -> str:
    """A link of the page as the site needs it; one to a file that is no part of the site becomes its text."""
    _, text, target = link.groups()
    path, hash_sign, anchor = target.partition("#")
    if not path or SCHEME.match(target):
        return link[0]
    source = OUTSIDE.get(page, f"docs/{page}")
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = site_path(wanted)
    if on_site is None:
        return text if (ROOT / wanted).exists() else link[0]  # one to nothing is left for mkdocs to refuse
    return f"{link[1]}[{text}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{hash_sign}{anchor})"


def site_path(path: str) -> str | None:
    """Where a file of the repository is on the site, None when it is not there."""
    for page, source in OUTSIDE.items():
        if path == source:
            return page
    if path.startswith("docs/") and (ROOT / path).is_dir():
        return f"{path[5:]}/README.md" if (ROOT / path / "README.md").exists() else None
    return path[5:] if path.startswith("docs/") else None
