"""Whatever a command cannot work with is one line on stderr and exit code 2."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from dit_train import command_line

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
BAD = {
    "fid.py": [
        (["score", "x", "--reference", "y", "--guidance", "nan"], "--guidance: 'nan' is no number"),
        ([], "COMMAND"),
        (["scor"], "scor"),
        (["score", "x"], "--reference"),
        (["score", "x", "--reference", "y", "--batch", "0"], "--batch: '0' is no whole number above 0"),
        (["score", "x", "--reference", "y", "--value-range", "0-1"], "--value-range: '0-1' is no LOW..HIGH"),
        (["score", "x", "--reference", "y", "--json", "absent/a"], "--json: absent/a cannot be written: name a file"),
        (["reference", "x", "--out", "absent/a.npz"], "--out: absent/a.npz cannot be written"),
        (["reference", "x", "--out", "a.npz", "--json", "."], "--json: . cannot be written"),
    ],
    "compare.py": [([], "RUN"), (["x"], "--out")],
    "plan.py": [
        (["x", "--ranks", "2", "--gpu", "h100", "--compare", "a.xlsx"], "--compare: a.xlsx names no picture: end it"),
        (["x", "--ranks", "2", "--gpu", "h100", "--compare", "absent/a.png"], "--compare: absent/a.png cannot be"),
        (["x", "--ranks", "2", "--gpu", "h100", "--json", "a" * 300], "a cannot be written (File name too long)"),
    ],
    "sweep.py": [
        (["x", "--optimizer", "y"], "--out"),
        (["x", "--optimizer", "y", "--out", "z", "--jobs", "0"], "--jobs: '0' is no whole number"),
        (["x", "--optimizer", "y", "--out", "z", "--start", "0"], "--start above 0"),
        (["x", "--optimizer", "y", "--out", "z", "--factor", "nan"], "--factor must be above 1"),
    ],
    "train_classifier.py": [
        (["--data", "cifar"], "cifar"),
        (["--data", "fashion_mnist", "--fashion-dir", "absent"], "set --fashion-dir to"),
        (["--data", "digits", "--out", __file__], Path(__file__).name),
    ],
    "bench_eval.py": [
        ([], "--json"),
        (["--json", "absent/a"], "absent/a"),
        (["--json", "a", "--rounds", "1"], "--rounds is 1"),
    ],
    "bench_checkpoint.py": [
        ([], "--json"),
        (["--json", "absent/a"], "absent/a"),
        (["--json", "a", "--rounds", "1"], "is 1"),
    ],
    "bench_optimizers.py": [(["--ranks", "2"], "--json"), (["--ranks", "1", "--json", "a"], "--ranks is 1")],
}


@pytest.mark.parametrize(("script", "words", "said"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_a_bad_command_line_is_one_line_and_code_2(script, words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    try:
        code = importlib.import_module(script.removesuffix(".py")).main()
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and said in error
    assert len(error.splitlines()) == 1 and error.startswith(script)


def test_rank_0_tells_first_what_all_ranks_meet(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert command_line.refuse("a\nb") == 2 and capsys.readouterr().err == "a b\n"
    assert len(waited) == 1 and waited[0] > 1


def test_a_link_to_a_folder_that_is_gone_is_no_place_for_a_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(argparse.ArgumentTypeError, match="name a file in a folder that exists"):
        command_line.new_file(str(tmp_path / "link"))


def test_to_find_out_whether_a_file_can_be_written_changes_nothing(tmp_path):
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.write_text("kept")
    assert command_line.new_file(str(there)) == there and there.read_text() == "kept"
    assert command_line.new_file(str(absent)) == absent and not absent.exists()
