"""The rules of the house hold, and each of them bites: a house with one fault fails the rule that is about it."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


house: Any = _load("house")
HOUSE = house.House.at(ROOT)
NO_EXCEPTIONS: dict[str, Any] = {"classes_named_twice": {}, "broad_excepts": {}, "hidden_imports": {}}


def of(**texts: str) -> Any:
    """A house of these modules, `a__b` for `a.b`, without exceptions."""
    modules = {}
    for name, text in texts.items():
        path = Path(*name.split("__")).with_suffix(".py")
        modules[name.replace("__", ".")] = house.Module(name.replace("__", "."), path, text)
    return house.House(modules, NO_EXCEPTIONS | {"names": {"forbidden": ["door"]}}, {"parts": {}, "walks": {}}, "")


@pytest.mark.slow  # `make check` runs them
@pytest.mark.parametrize("rule", house.RULES)
def test_the_rules_hold(rule: Callable[[Any], Any]) -> None:
    assert rule(HOUSE).problems == []


@pytest.mark.slow  # `make check` runs it
def test_imports_point_along_the_arrows() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (house.folders_are_small, of(**{f"a__m{i}": "" for i in range(16)})),
        (house.folders_do_not_import_each_other, of(a__x="import b.y", b__x="", b__y="import a.z", a__z="")),
        (
            house.modules_are_narrow,
            of(a="\n".join(f"import m{i}" for i in range(19)), **{f"m{i}": "" for i in range(19)}),
        ),
        (house.class_names_are_unique, of(a="class Twice: ...", b="class Twice: ...")),
        (house.broad_excepts_have_a_reason, of(a="try:\n    pass\nexcept Exception:\n    pass")),
        (house.broad_excepts_have_a_reason, of(a="try:\n    pass\nexcept (ValueError, BaseException):\n    pass")),
        (house.hidden_imports_have_a_reason, of(a="def f():\n    import os")),
        (house.prose_is_technical, of(a='"""Sequences who wait."""')),
        (house.prose_is_technical, of(a="# nobody waits")),
        (house.names_are_the_fields, of(a="class FrontDoor: ...")),
        (house.the_glossary_is_true, replace(of(a=""), glossary="| term | `README.md.gone` | what |")),
        (house.the_glossary_is_true, replace(of(a=""), glossary="| no such term of ours | `LICENSE` | what |")),
        (
            house.walks_are_true,
            replace(
                of(funitel__a="def f(): ..."),
                walks={"parts": {"p": ["a:gone"]}, "walks": {"w": {"parts": ["p"], "max_rooms": 1}}},
            ),
        ),
        (
            house.walks_are_true,
            replace(
                of(funitel__router__a="def f(): ..."),
                walks={"parts": {"p": ["router.a:f"]}, "walks": {"w": {"parts": ["p"], "max_rooms": 0}}},
            ),
        ),
    ],
)
def test_each_rule_finds_what_it_is_about(rule: Callable[[Any], Any], wrong: Any) -> None:
    assert rule(wrong).problems


def test_an_exception_that_is_not_needed_is_wrong() -> None:
    excepted = replace(of(a=""), exceptions=NO_EXCEPTIONS | {"broad_excepts": {"a:f": "a reason"}})
    assert house.broad_excepts_have_a_reason(excepted).problems
