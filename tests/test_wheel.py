"""The wheel holds everything that a checkout has."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_packages() -> set[str]:
    folders = {path.parent for name in ("dit_train", "optimizers", "eval") for path in (ROOT / name).rglob("*.py")}
    return {".".join(folder.relative_to(ROOT).parts) for folder in folders}


def test_no_package_is_forgotten():
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == source_packages() | {"dit_train.configs"}


@pytest.mark.long
def test_the_wheel_holds_configs_data_weights_and_notices(tmp_path):
    source = tmp_path / "source"  # a build leaves folders behind; the checkout stays clean
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=300)
    names = zipfile.ZipFile(next(tmp_path.glob("dit_train-*.whl"))).namelist()
    wanted = [
        *(f"dit_train/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("configs/**/*.yaml")),
        "dit_train/data/digits.npz",
        "dit_train/data/digits.NOTICE",
        "dit_train/py.typed",
        "optimizers/py.typed",
        "eval/py.typed",
    ]
    assert set(wanted) <= set(names)
    assert any(name.startswith("eval/weights/digits-cnn-") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert not any(name.startswith(("tests", "scripts", "configs")) for name in names)
