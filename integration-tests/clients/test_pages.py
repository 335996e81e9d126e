"""The blocks of the pages that are marked `<!-- run: TEXT -->`, as they are but for the server's address."""

import contextlib
import io
import subprocess

import pytest

from funitel_testing.documents.blocks import Block, all_blocks
from funitel_testing.servers import Server

MARKED = [block for block in all_blocks() if block.expected is not None]
ADDRESS = "localhost:3000"  # of the pages


@pytest.mark.parametrize("block", MARKED, ids=str)
def test_a_marked_block_prints_what_its_mark_says(block: Block, server: Server) -> None:
    assert block.expected is not None
    text = block.text.replace(ADDRESS, f"127.0.0.1:{server.port}")
    said = io.StringIO()
    if block.language == "python":
        with contextlib.redirect_stdout(said):
            exec(compile(text, str(block), "exec"), {"__name__": "__main__"})
    else:
        done = subprocess.run(["bash", "-eu", "-c", text], capture_output=True, text=True, timeout=120, check=True)
        said.write(done.stdout)
    assert block.expected in said.getvalue()


def test_the_first_pages_run_their_requests() -> None:
    marked = {(block.page, block.language) for block in MARKED}
    assert marked >= {(page, kind) for page in ("README.md", "docs/quickstart.md") for kind in ("sh", "python")}
    unmarked = [b for b in all_blocks() if b.page in ("README.md", "docs/quickstart.md") and b.expected is None]
    assert not [str(block) for block in unmarked if "curl" in block.text or block.language == "python"]
