"""Every example in a docstring of the library runs and prints what it says."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

from minserve.errors import MissingRequirement

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "minserve").rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
MODULES = [name for name in MODULES if not name.endswith("__main__")]  # runs when imported


def load(name):
    """The module, or a skip if it needs an optional package that is not here."""
    try:
        return importlib.import_module(name)
    except MissingRequirement as missing:
        pytest.skip(str(missing))
    except ModuleNotFoundError as missing:
        if name.endswith("_triton") and missing.name == "triton":
            pytest.skip("triton is not installed")
        raise


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = load(name)
    assert Path(module.__file__).is_relative_to(ROOT), "tested is this checkout, not an installed copy"
    failed, _ = doctest.testmod(module)
    assert failed == 0, f"{failed} examples of {name} fail; their output is above"


def test_a_wrong_example_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_example.py").write_text('"""\n>>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert doctest.testmod(load("wrong_example")).failed == 1
    assert "Expected:\n    3" in capsys.readouterr().out
    sys.modules.pop("wrong_example")


def test_a_missing_package_is_not_hidden():
    with pytest.raises(ModuleNotFoundError):
        load("minserve.no_such_module")
