"""Rules of the house that no linter knows: sizes of folders and imports, names, docstrings, the glossary, the walks.

    python scripts/house.py          every rule with what it measured; exit code 1 where one is broken

`.importlinter` holds the direction of imports between packages. `scripts/house.toml` holds the exceptions, each with a
reason; an exception that is no longer needed is an error too. `scripts/walks.toml` lists the functions that a request
passes, `docs/glossary.md` the module of each term.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PARTS = ("proto", "router", "model_server", "launcher", "llm")

MAX_MODULES_OF_A_FOLDER = 15
MAX_IMPORTS_OF_A_MODULE = 18  # of ours
MAX_BROAD_EXCEPTS = 30
MAX_HIDDEN_IMPORTS = 20
MAX_CLASSES_NAMED_TWICE = 10

PEOPLE = re.compile(
    r"\b(who|whoever|whom|whose|nobody|somebody|everybody|gives? way|newcomers?|welcomed?|farewells?)\b", re.IGNORECASE
)
"""Words for people, which sequences, blocks, requests and processes are not."""


@dataclass(frozen=True)
class Module:
    """A module of the product: its dotted name, its file and its text."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def definitions(self) -> Iterator[tuple[str, ast.AST]]:
        """Qualified name and node of every class and function, outer ones first."""
        yield from _definitions(self.tree, "")

    def owner_of(self, line: int) -> str:
        """Qualified name of the innermost class or function around a line, or "" at module level."""
        found = ""
        for name, node in self.definitions():
            if node.lineno <= line <= (node.end_lineno or 0):  # type: ignore[attr-defined]
                found = name
        return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


@dataclass(frozen=True)
class House:
    """The modules of the product by name, and the exceptions from the rules."""

    modules: dict[str, Module]
    exceptions: dict[str, Any]
    walks: dict[str, Any]
    glossary: str

    @classmethod
    def at(cls, root: Path) -> "House":
        """Read a checkout."""
        modules = {}
        for part in PARTS:
            for path in sorted((root / part / "funitel").rglob("*.py")):
                if "_pb2" not in path.name:
                    name = ".".join(path.relative_to(root / part).with_suffix("").parts).removesuffix(".__init__")
                    modules[name] = Module(name, path, path.read_text())
        return cls(
            modules,
            tomllib.loads((root / "scripts/house.toml").read_text()),
            tomllib.loads((root / "scripts/walks.toml").read_text()),
            (root / "docs/glossary.md").read_text(),
        )

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of ours that each module imports, anywhere in it."""
        return {name: set(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name for name in names if name in self.modules)
                if node.module in self.modules and any(name not in self.modules for name in names):
                    yield node.module


@dataclass(frozen=True)
class Finding:
    """What a rule measured, the bound it is held to, and what breaks it."""

    measured: int
    bound: int
    problems: list[str]


def folders_are_small(house: House) -> Finding:
    """modules in the fullest folder"""
    sizes = Counter(m.folder for m in house.modules.values() if m.path.name != "__init__.py")
    wrong = [f"{folder}: {size} modules" for folder, size in sizes.items() if size > MAX_MODULES_OF_A_FOLDER]
    return Finding(max(sizes.values()), MAX_MODULES_OF_A_FOLDER, wrong)


def folders_do_not_import_each_other(house: House) -> Finding:
    """pairs of folders that import each other"""
    folder_of = {name: module.folder for name, module in house.modules.items()}
    arrows = defaultdict(list)
    for name, targets in house.imports.items():
        for target in targets:
            if folder_of[name] != folder_of[target]:
                arrows[folder_of[name], folder_of[target]].append(f"{name} -> {target}")
    pairs = [(a, b) for a, b in arrows if (b, a) in arrows and a < b]
    return Finding(len(pairs), 0, ["; ".join(arrows[a, b] + arrows[b, a]) for a, b in pairs])


def modules_are_narrow(house: House) -> Finding:
    """imports of ours in the widest module"""
    widths = {name: len(targets) for name, targets in house.imports.items()}
    wrong = [f"{name}: {width} imports" for name, width in widths.items() if width > MAX_IMPORTS_OF_A_MODULE]
    return Finding(max(widths.values()), MAX_IMPORTS_OF_A_MODULE, wrong)


def class_names_are_unique(house: House) -> Finding:
    """public classes named twice"""
    homes = defaultdict(list)
    for module in house.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module.name)
    twice = {name: [", ".join(modules)] for name, modules in homes.items() if len(modules) > 1}
    return _listed(house, "classes_named_twice", twice, MAX_CLASSES_NAMED_TWICE)


def broad_excepts_have_a_reason(house: House) -> Finding:
    """excepts that catch anything"""
    found = defaultdict(list)
    for module in house.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                found[f"{module.name}:{module.owner_of(node.lineno)}"].append(f"{module.path}:{node.lineno}")
    return _listed(house, "broad_excepts", found, MAX_BROAD_EXCEPTS)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is None or getattr(each, "id", "") in ("Exception", "BaseException") for each in caught)


def hidden_imports_have_a_reason(house: House) -> Finding:
    """imports inside functions"""
    found = defaultdict(list)
    for module in house.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and (owner := module.owner_of(node.lineno)):
                found[f"{module.name}:{owner}"].append(f"{module.path}:{node.lineno}")
    return _listed(house, "hidden_imports", found, MAX_HIDDEN_IMPORTS)


def _listed(house: House, table: str, found: dict[str, list[str]], bound: int) -> Finding:
    """Findings against the exceptions of a table: both those that it lacks and those that are gone are wrong."""
    reasons = house.exceptions[table]
    wrong = [f"{place}: no reason in [{table}]: {', '.join(found[place])}" for place in found.keys() - reasons.keys()]
    wrong += [f"{place}: is in [{table}] and no longer there" for place in reasons.keys() - found.keys()]
    total = len(found) if table == "classes_named_twice" else sum(map(len, found.values()))
    wrong += [f"{total} in all, at most {bound}"] if total > bound else []
    return Finding(total, bound, wrong)


def prose_is_technical(house: House) -> Finding:
    """lines of docstrings and comments that speak of people"""
    wrong = []
    for module in house.modules.values():
        for number, line in _prose(module):
            if PEOPLE.search(line):
                wrong.append(f"{module.path}:{number}: {line.strip()}")
    return Finding(len(wrong), 0, wrong)


def _prose(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            for offset, line in enumerate((ast.get_docstring(node, clean=False) or "").splitlines()):
                yield (first.lineno if first else 1) + offset, line
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names_are_the_fields(house: House) -> Finding:
    """modules and classes called by a word that is no term of the field"""
    words = house.exceptions["names"]["forbidden"]
    wrong = []
    for module in house.modules.values():
        named = [module.name.rpartition(".")[2]]
        named += [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        for name in named:
            parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+", name)}
            wrong += [f"{module.name}: {name} has the word {word}" for word in words if word in parts]
    return Finding(len(wrong), 0, wrong)


def the_glossary_is_true(house: House) -> Finding:
    """terms of docs/glossary.md whose module is gone or lacks the word"""
    rows = re.findall(r"^\| ([^|]+?) \| `([^`]+)` \|", house.glossary, re.MULTILINE)
    wrong = [] if rows else ["the glossary has no rows"]
    for terms, place in rows:
        path = ROOT / place
        if not path.exists():
            wrong.append(f"{terms}: {place} is not there")
            continue
        text = f"{place} {path.read_text()}".lower().replace("_", " ")
        for term in terms.split(", "):
            if term.lower() not in text:
                wrong.append(f"{term}: {place} does not have the word")
    return Finding(len(wrong), 0, wrong)


def walks_are_true(house: House) -> Finding:
    """functions of scripts/walks.toml that are gone, and walks that grew"""
    wrong, most = [], 0
    for walk, content in house.walks["walks"].items():
        steps = [step for part in content["parts"] for step in house.walks["parts"][part]]
        wrong += [f"{walk}: {step} is not there" for step in steps if not _is_there(house, step)]
        rooms = {room for step in steps if (room := step.partition(":")[0]).startswith("router.")}
        most = max(most, len(rooms))
        if len(rooms) > content["max_rooms"]:
            wrong.append(f"{walk}: {len(rooms)} modules, at most {content['max_rooms']}")
    return Finding(most, max((walk["max_rooms"] for walk in house.walks["walks"].values()), default=0), wrong)


def _is_there(house: House, step: str) -> bool:
    name, _, qualified = step.partition(":")
    module = house.modules.get(f"funitel.{name}")
    return module is not None and qualified in {found for found, _ in module.definitions()}


RULES: tuple[Callable[[House], Finding], ...] = (
    folders_are_small,
    folders_do_not_import_each_other,
    modules_are_narrow,
    class_names_are_unique,
    broad_excepts_have_a_reason,
    hidden_imports_have_a_reason,
    prose_is_technical,
    names_are_the_fields,
    the_glossary_is_true,
    walks_are_true,
)


def main() -> int:
    """Print what each rule measured, then what breaks one."""
    house = House.at(ROOT)
    findings = {rule: rule(house) for rule in RULES}
    for rule, finding in findings.items():
        print(f"{rule.__doc__:<70} {finding.measured:>4}  at most {finding.bound}")
    problems = [f"{rule.__doc__}: {problem}" for rule, finding in findings.items() for problem in finding.problems]
    print(*(f"error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
