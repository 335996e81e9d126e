"""Every fenced block of the pages: of a known language, parsed, its commands and requests checked against the code."""

import ast
import importlib
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from funitel.model_server.registry.lookup import FAMILIES
from funitel_testing.documents.blocks import ROOT, Block, all_blocks, blocks_of, misread_lines, pages
from funitel_testing.documents.command_lines import problems_of
from funitel_testing.documents.commands import check_commands
from funitel_testing.documents.links import dead_links
from funitel_testing.documents.prose import commands_in, flags_in, known_flags, missing_tests
from funitel_testing.documents.shell import commands_of

BLOCKS = all_blocks()
PAGES = [*pages(), ROOT / "CHANGELOG.md"]
HISTORY = ("CHANGELOG.md", "log.md")  # name what was there at the time
INVENTED = ("random.py",)  # of an attacker

in_pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def in_language(*languages: str) -> "pytest.MarkDecorator":
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in languages], ids=str)


# What a block of a language must be; `text` is for what is in no language: drawings, logs, answers.
DIFF_MARKS = ("+", "-", " ", "@@", "diff ", "index ")


def parse_diff(text: str) -> None:
    strange = [line for line in text.splitlines() if line and not line.startswith(DIFF_MARKS)]
    assert not strange, strange


def parse_python(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("funitel"):
            module = importlib.import_module(node.module or "")
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, missing


COMMAND = re.compile(r"(\$ |(funitel|text-generation|curl|docker|make|pip|export)(-\w+)? )")


def parse_text(text: str) -> None:
    commands = [line for line in text.splitlines() if COMMAND.match(line.lstrip())]
    assert not commands, f"commands belong in a block of sh: {commands}"


PARSERS: Mapping[str, Callable[[str], object]] = {
    "diff": parse_diff,
    "json": json.loads,
    "python": parse_python,
    "sh": lambda text: subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True),
    "text": parse_text,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_in_its_language(block: Block) -> None:
    assert block.language in PARSERS, f"{block}: name one of {', '.join(PARSERS)} after the fence"
    PARSERS[block.language](block.text)


@in_pages
def test_a_page_reads_alike_on_github_and_on_the_site(path: Path) -> None:
    assert list(misread_lines(path.read_text())) == []


@in_language("sh")
def test_a_command_names_what_exists(block: Block) -> None:
    check_commands(block.text)


def test_every_command_line_of_ours_parses() -> None:
    lines = [(block, command) for block in BLOCKS if block.language == "sh" for command in check_commands(block.text)]
    problems = problems_of([(command.words, command.variables) for _, command in lines])
    found = [
        f"{block}: {' '.join(command.words)}: {problem}"
        for (block, command), problem in zip(lines, problems, strict=True)
        if problem is not None
    ]
    assert len(lines) > 20
    assert not found, "\n".join(found)


def test_commands_in_the_text_parse() -> None:
    named = [(path.name, line, command) for path in PAGES for line in commands_in(path.read_text())
             for command in check_commands(line)]  # fmt: skip
    problems = problems_of([(command.words, command.variables) for _, _, command in named])
    found = [(*line, problem) for line, problem in zip(named, problems, strict=True) if problem]
    assert len(named) > 20
    # A name such as `funitel generate` stands without what it needs.
    assert [
        line
        for line in found
        if not re.search("Missing argument|needs a command|requires an argument|--join must", line[-1])
    ] == []


@in_pages
def test_a_flag_in_the_text_exists(path: Path) -> None:
    assert flags_in(path.read_text()) - known_flags() == set()


@pytest.mark.parametrize("path", [p for p in PAGES if p.name not in HISTORY], ids=lambda path: path.name)
def test_tests_and_modules_in_the_text_exist(path: Path) -> None:
    assert [name for name in missing_tests(path.read_text()) if name not in INVENTED] == []


def test_the_page_of_models_lists_every_decoder() -> None:
    text = (ROOT / "docs/models.md").read_text().lower()
    assert [name for name in FAMILIES if f"`{name.lower()}`" not in text] == []


@in_pages
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path) == []


# The checks themselves


def test_a_wrong_command_line_is_found() -> None:
    wrong = [
        ("funitel", "--prot", "3000"),
        ("funitel", "--num-shard", "two"),
        ("funitel", "--quantize", "exl2"),
        ("funitel", "bench", "--urls", "x"),
        ("funitel", "models", "m", "--num-shards", "2"),
        ("funitel", "key", "make"),
        ("funitel-router", "--model-id", "m"),
        ("funitel-server", "serve"),
    ]
    right = [
        ("funitel",),
        ("funitel", "--model-id", "m", "--config", "/no/such"),
        ("funitel", "bench", "kernels", "m"),
        ("funitel", "models", "m", "--num-shard", "2"),
        ("funitel", "key", "list"),
        ("text-generation-launcher", "--port", "80"),
    ]
    *problems, by_variable = problems_of([*((words, {}) for words in wrong + right), (("funitel",), {"PORT": "many"})])
    assert [words for words, problem in zip(wrong, problems, strict=False) if problem is None] == []
    assert problems[len(wrong) :] == [None] * len(right)
    assert by_variable is not None


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "from funitel.llm import LLMM"),
        ("python", "print("),
        ("text", "$ ls"),
        ("text", "a\nfunitel serve x"),
        ("diff", "a"),
        ("json", "{a: 1}"),
        ("yaml", "a: b: c"),
        ("toml", "a ="),
        ("sh", "if true"),
    ],
)
def test_a_wrong_block_is_found(language: str, text: str) -> None:
    with pytest.raises((AssertionError, SyntaxError, ValueError, yaml.YAMLError, subprocess.CalledProcessError)):
        PARSERS[language](text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("curl localhost:3000/v2/chat", "no route has GET /v2/chat"),
        ("curl -X POST localhost:3000/health", "no route has POST /health"),
        ("curl --json '{\"inputs\": 1}' localhost:3000/generate", "inputs"),
        ('curl --json \'{"input": "a"}\' localhost:3000/generate', "input: unknown field"),
        ('curl --json \'{"inputs": "a", "max_tokens": 1}\' http://127.0.0.1:3000/generate', "unknown field"),
        ('curl -d \'{"inputs": "a"}\' localhost:3000/generate', "content-type"),
        ("curl --json '{inputs: 1}' localhost:3000/generate", "Expecting property name"),
        ("curl -X POST localhost:3000/generate", "needs a body"),
        ("curl --jsn '{}' localhost:3000/generate", "curl: "),
        ("cat x | curl localhost:3000/helth", "no route"),
        ("make serv", "no target serv"),
        ("make serve && python benchmarks/nothing.py", "no benchmarks/nothing.py"),
        ("pytest integration-tests/test_nothing.py -q", "no integration-tests/test_nothing.py"),
        ("python -m funitel_testing.nothing", "no module"),
        ("export MAX_INPUT_TOKNS=3", "no variable MAX_INPUT_TOKNS"),
        ("docker run -e MODELID=x funitel", "no variable MODELID"),
        ("pip install 'funitel[sever]'", "no extra sever"),
    ],
)
def test_a_wrong_command_is_found(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_commands(text)


def test_a_shell_text_is_split_into_its_commands() -> None:
    text = """# a comment's quote
export A=1  # why
B='x y' funitel --port 1 \\
    --hostname ::1 > log 2>&1 &
cat <<'END' | tee x
anything "goes
END
curl --json '{"a":
 "b # c"}' x; if true; then make; fi
echo "$(funitel top)" && (funitel chat)
"""
    found = [(command.words, dict(command.variables)) for command in commands_of(text)]
    assert found == [
        (("export",), {"A": "1"}),
        (("funitel", "--port", "1", "--hostname", "::1"), {"B": "x y"}),
        (("cat",), {}),
        (("tee", "x"), {}),
        (("curl", "--json", '{"a":\n "b # c"}', "x"), {}),
        (("if", "true"), {}),
        (("make",), {}),
        (("fi",), {}),
        (("echo", "$(funitel top)"), {}),
        (("funitel", "chat"), {}),
    ]


def test_a_container_and_make_start_our_program() -> None:
    text = 'docker run --name funitel -p 1:80 funitel:latest --port 80\nmake serve ARGS="--port 3001 --quiet"'
    assert [command.words for command in check_commands(text)] == [
        ("funitel", "--port", "80"),
        ("funitel", "--port", "3001", "--quiet"),
    ]


def test_blocks_are_found_with_their_marks() -> None:
    text = "a\n<!-- run: Paris -->\n```sh\nx\n```\n- b\n\n  ````text\n  ```\n  y\n  ````\n\n```\nz\n```\n"
    assert list(blocks_of(text, "p")) == [
        Block("p", 3, "sh", "x\n", "Paris"),
        Block("p", 8, "text", "```\ny\n"),
        Block("p", 13, "", "z\n"),
    ]
    with pytest.raises(ValueError, match="p:1: the fence is not closed"):
        list(blocks_of("```sh\nx\n", "p"))


def test_what_the_site_would_misread_is_found() -> None:
    text = "a\n- b\n\nc\n\n    d\n\n1. e\n\n   ```sh\n   f\n   ```\n\n    g\n- h\n"
    assert [line.partition(":")[0] for line in misread_lines(text)] == ["2", "6", "10", "12"]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b`, c's\n\n```text\n# d\n```\n\n## A\n## A\n<a id='e'></a>\n")
    page = tmp_path / "page.md"
    right = "[x](other.md) [x](other.md#a-b-cs) [x](other.md#a_1) [x](#here) `[x](no)` [x](https://y/z)\n# Here"
    page.write_text(f"{right}\n```text\n[x](none)\n```\n")
    assert dead_links(page) == []
    wrong = ["none.md", "other.md#d", "#there", "/other.md", "folder/", "https:/x", "http://y:0/", "htp://z"]
    page.write_text(" ".join(f"[x\ny]({target})" for target in wrong))
    assert dead_links(page) == wrong


def test_a_test_that_is_not_there_is_found() -> None:
    text = "`test_documents.py::test_links_lead_somewhere`, `::test_links_lead_somewhere`, `commands.py`"
    assert missing_tests(text) == []
    wrong = "`test_wheel.py::test_links_lead_somewhere`, `S::test_nothing`, `no/such.py`"
    assert missing_tests(wrong) == ["test_wheel.py::test_links_lead_somewhere", "S::test_nothing", "no/such.py"]


def test_a_wrong_flag_in_the_text_is_found() -> None:
    text = "`--prot 1`, `--port` and `--no-json-output`\n```sh\n--in-a-block\n```\n"
    assert flags_in(text) - known_flags() == {"--prot"}
    assert list(commands_in("`funitel --num-shard N`, `funitel`, `make\nserve`")) == [
        "funitel --num-shard 2",
        "make serve",
    ]
