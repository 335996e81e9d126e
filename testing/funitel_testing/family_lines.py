"""How much code each architecture has of its own: the lines of its row, and those beyond it.

Usage: python -m funitel_testing.family_lines. A row has the defaults of its class with it. Lines beyond are the helpers
of the rows that this row alone uses, and every line of the model server's other modules that names the architecture;
files that read other formats' names for it are no model code. The last line is one JSON object.
"""

import ast
import json
from pathlib import Path

from funitel.model_server.registry import families, lookup, rules

_FAMILIES, _RULES = (Path(package.__path__[0]) for package in (families, rules))
_PACKAGE = _FAMILIES.parents[1]


def count_lines() -> dict[str, tuple[int, int]]:
    """Architecture -> (lines of its row, lines of code of its own elsewhere)."""
    modules = [ast.parse(path.read_text()) for folder in (_FAMILIES, _RULES) for path in sorted(folder.glob("*.py"))]
    rows = {name: node for tree in modules for name, node in _rows(tree, "ROWS").items()}
    helpers = {name: node for tree in modules for name, node in _helpers(tree).items()}
    defaults = _rows(ast.parse(Path(lookup.__file__).read_text()), "CLASS_DEFAULTS")
    sizes = {name: _length(node) + (_length(defaults[name]) if name in defaults else 0) for name, node in rows.items()}
    users: dict[str, set[str]] = {helper: set() for helper in helpers}
    for architecture, node in rows.items():
        for helper in _reachable(node, helpers):
            users[helper].add(architecture)
    return {
        architecture: (
            sizes[architecture],
            sum(_length(helpers[h]) for h, u in users.items() if u == {architecture}) + named,
        )
        for architecture in rows
        for named in [_named_elsewhere(architecture)]
    }


def _rows(tree: ast.Module, name: str) -> dict[str, ast.expr]:
    table = next((n for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == name), None)
    if table is None:
        return {}
    assert isinstance(table.value, ast.Dict)
    return {
        ast.literal_eval(key): value for key, value in zip(table.value.keys, table.value.values, strict=True) if key
    }


def _helpers(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions of a module, and what it assigns that computes; plain values that rows share are data."""
    found: dict[str, ast.stmt] = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if any(isinstance(part, ast.Lambda) for part in ast.walk(node.value)):
                found[node.targets[0].id] = node
    return found


def _reachable(node: ast.AST, helpers: dict[str, ast.stmt]) -> set[str]:
    """Helpers that a row or another helper reads, directly or through others."""
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    found = read & helpers.keys()
    return found.union(*(_reachable(helpers[helper], helpers) for helper in found))


def _length(node: ast.stmt | ast.expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _named_elsewhere(architecture: str) -> int:
    modules = (
        path
        for path in _PACKAGE.rglob("*.py")
        if path.parent not in (_FAMILIES, _RULES) and path != Path(lookup.__file__) and "gguf" not in path.name
    )
    return sum(architecture in line for path in modules for line in path.read_text().splitlines())


def main() -> None:
    """Print the table."""
    counts = count_lines()
    print(f"{'architecture':<34}{'row':>6}{'beyond':>8}")
    for architecture, (row, beyond) in counts.items():
        print(f"{architecture:<34}{row:>6}{beyond:>8}")
    rows, beyond = (sum(count[i] for count in counts.values()) for i in range(2))
    print(json.dumps({"architectures": len(counts), "row_lines": rows, "lines_beyond": beyond}))


if __name__ == "__main__":
    main()
