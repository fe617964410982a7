"""The wheel: it holds all that is needed, and works away from the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of what is needed, so that the checkout stays clean."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "minserve", source / "minserve", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_weights_and_data_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("minserve/model/weights/tiny/model.safetensors", "minserve/model/weights/tiny_attention/config.json",
                   "minserve/model/weights/tiny_draft/model.safetensors",
                   "minserve/model/weights/tiny/figures.json", "minserve/data/hardware.json",
                   "minserve/data/models/qwen3.8-2.4t-a95b.json"):  # fmt: skip
        assert wanted in names
    assert not [name for name in names if name.startswith(("tests", "solutions", "exercises", "chapters"))]


def test_the_wheel_generates_text_away_from_the_checkout(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], check=True, capture_output=True)
    code = "import minserve; from minserve import LLM; print(minserve.__file__); print(len(LLM().generate('def ')))"
    where = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=where, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    where, count = run.stdout.split()
    assert Path(where).is_relative_to(tmp_path / "site") and count == "1"
