"""What the README tells a person to type works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder: Path, block: str, *command: str) -> str:
    script = folder / "train.py"
    script.write_text(block)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *command, str(script)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        if "terminate called without an active exception" not in done.stderr:
            break  # else gloo's threads aborted the process on its way out, as they do now and then: once more
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_an_optimizer_alone_under_torchrun(tmp_path):
    block = next(block for block in BLOCKS if "fully_shard" in block)
    shown = run(tmp_path, block, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    sent = [int(count) for count in re.findall(r"^\d+ (\d+) bytes sent", shown, re.MULTILINE)]
    assert [count > 0 for count in sent] == [step % 3 == 0 for step in range(10)]
    assert "periodic_row_muon" in shown


@pytest.mark.long
def test_replicas_that_share_the_work(tmp_path):
    text = (ROOT / "optimizers" / "README.md").read_text()
    block = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "process_group=" in block)
    block += "torch.distributed.barrier()\ntotal = sum(p.double().sum().item() for p in net.parameters())\n"
    block += "print(f'sum {total:.9f}\\n', end='')\n"  # in one piece, or ranks print into each other's lines
    shown = run(tmp_path, block, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert sorted(re.findall(r"rank (\d): [1-9]\d* bytes sent", shown)) == ["0", "1"]
    sums = re.findall(r"sum (-?\d+\.\d+)", shown)
    assert len(sums) == 2 and len(set(sums)) == 1


@pytest.mark.long
def test_an_optimizer_under_accelerate(tmp_path):
    block = next(block for block in BLOCKS if "accelerate" in block)
    shown = run(tmp_path, block, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    assert shown.splitlines().count("done") == 1


def test_every_file_that_the_readme_names_exists():
    named = set(re.findall(r"(?:configs|scripts|docs|optimizers)/[\w./-]+\.\w+", README))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def cells(text: str, first: str) -> list[list[str]]:
    """Rows of the table whose head begins with these columns."""
    rows = text.partition(first)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_plans_that_the_readme_shows_are_those_of_the_whole_table():
    whole = cells((ROOT / "docs" / "planning.md").read_text(), "| size | optimizer |")
    shown = cells(README, "| size | GiB a rank")
    assert len(whole) == 20 and len(shown) == 5
    for (size, memory, adamw, *others), start in zip(shown, range(0, 20, 4), strict=True):
        assert {row[0] for row in whole[start : start + 4]} == {size}
        assert memory == whole[start][2] and adamw == f"{whole[start][4]} ms"
        expected = [f"{step} ms, {more}, {sent} MB" for _, _, _, sent, step, more, _ in whole[start + 1 : start + 4]]
        assert others == expected


def test_every_setting_that_the_readme_names_exists():
    from dit_train import overlays

    flags = set(re.findall(r"--((?:optimizer|data|run|score|train)\.\w+)", README)) - {"section.key"}
    assert len(flags) > 5
    for flag in flags:
        section, key = flag.split(".")
        assert key in overlays.to_dict(overlays.read([]))[section], flag
