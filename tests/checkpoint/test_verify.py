"""``python -m dit_train verify RUN``: sound and damaged checkpoints told apart, each in a line, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from dit_train import __main__
from dit_train.checkpoint import files, manifest, metadata, verify
from dit_train.config import ParallelConfig
from dit_train.parallel.mesh import joined
from tests.checkpoint.trained import Trained

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with joined(ParallelConfig(device="cpu")):
        yield


def flip(path: Path, at: float = 0.5) -> None:
    """One bit of a file, where `at` of it lies before."""
    raw = bytearray(path.read_bytes())
    raw[int(at * len(raw))] ^= 1
    path.write_bytes(raw)


def test_sound_ones_are_code_0_and_a_line_each_without_torch(tmp_path):
    Trained(0, 1).save(tmp_path, 1, 2)
    code = (
        "import sys; from dit_train.__main__ import main; code = main(['verify', sys.argv[1]]);"
        "heavy = {'torch', 'numpy'} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == 2 and all(f"step_000000{step}: sound, step {step}, " in lines[step - 1] for step in (1, 2))
    # two weights of 78 and biases of 13 + 6: model, average, and 1 or 2 moments
    assert "14 tensors of 544 numbers, 2 files, " in lines[0] and lines[0].endswith(" kB")


@pytest.mark.parametrize("name", ["__0_0.distcp", metadata.NAME, manifest.NAME])
@pytest.mark.parametrize("at", [0.01, 0.5, 0.99])
def test_one_flipped_bit_is_code_2_and_names_the_file(tmp_path, capsys, name, at):
    folder = Trained(0, 1).save(tmp_path, 1, 2)
    flip(folder / name, at)
    assert __main__.main(["verify", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "step_0000001: sound" in shown.out and "1 of 2 checkpoints damaged" in shown.out
    (line,) = shown.err.splitlines()
    assert f"{folder}: damaged checkpoint ({name}" in line and "remove that folder" in line


def test_a_missing_and_a_cut_file(tmp_path, capsys):
    folder = Trained(0, 1).save(tmp_path, 1)
    whole = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(whole[:-1])
    assert verify.verify(tmp_path) == 2 and "has" in capsys.readouterr().err
    (folder / "__0_0.distcp").unlink()
    assert verify.verify(tmp_path) == 2 and "no __0_0.distcp" in capsys.readouterr().err


def test_what_a_cut_off_save_left_is_said_and_no_damage(tmp_path, capsys):
    folder = Trained(0, 1).save(tmp_path, 1)
    folder.with_name("step_0000002.tmp").mkdir()
    assert verify.verify(tmp_path) == 0
    assert "cut off" in capsys.readouterr().out


def test_a_folder_without_checkpoints_and_no_folder_are_code_2(tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 2 and verify.main([]) == 2
    assert "no checkpoint there" in capsys.readouterr().err
    assert verify.main(["--help"]) == 0


def test_progress_adds_up_and_the_sum_is_that_of_sha256sum(tmp_path):
    path, told = tmp_path / "file", []
    path.write_bytes(bytes(range(256)) * 40_000)
    assert files.sha256(path, told.append) == subprocess.check_output(["sha256sum", path], text=True).split()[0]
    assert sum(told) == 10_240_000 and len(told) > 1


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (1200, "1.2 kB"), (3.4e6, "3.4 MB"), (5e12, "5000.0 GB")])
def test_sizes_read_well(count, text):
    assert files.size(count) == text
