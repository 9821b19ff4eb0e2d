"""What is refused before a rank starts, and that a refusal changes nothing on disk."""

import fcntl
import hashlib
from dataclasses import replace
from threading import Timer

import pytest
import torch

from dit_train import overlays, preflight
from dit_train.checkpoint import manifest
from dit_train.checkpoint.manifest import File, Manifest, RunState
from dit_train.config import ConfigError
from dit_train.launch import shutdown_seconds
from dit_train.run import folder


def plan(tmp_path, *arguments, ranks=2):
    base = ["--model.width", "64", "--model.heads", "4", "--model.depth", "1", "--run.folder", str(tmp_path / "run")]
    return preflight.check(overlays.read([], [*base, *arguments]), ranks)


def refusal(tmp_path, *arguments, ranks=2) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, *arguments, ranks=ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_checkpoint(tmp_path, step=10, **fixed):
    """A folder that looks like a complete checkpoint of `plan`'s settings."""
    made = plan(tmp_path)
    where = tmp_path / "run" / "checkpoints" / f"step_{step:07d}"
    where.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("# dit-train: a test\n")
    (where / "part.distcp").write_bytes(b"12345")
    part = File(5, hashlib.sha256(b"12345").hexdigest())
    run = RunState(step, 1.0, compute_dtype="fp32")
    manifest.write(where, Manifest(run, made.fixed | fixed, [], {"part.distcp": part}))
    return where


def test_a_new_run_may_start(tmp_path):
    made = plan(tmp_path)
    assert made.resume is None and not made.finished
    assert not (tmp_path / "run").exists()


def test_ranks_that_do_not_divide_the_batch_name_what_would(tmp_path):
    text = refusal(tmp_path, "--train.batch", "128", ranks=3)
    assert "128 images do not divide over 3 ranks; use 2 or 4 ranks, or a batch of 126 or 129" in text


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (["--parallel.replicas", "3"], 4, "3 replicas x 1 tensor ranks do not divide 4 ranks"),
        (["--parallel.tensor", "2"], 3, "1 replicas x 2 tensor ranks do not divide 3 ranks"),
        ([*"--parallel.tensor 4 --model.width 384 --model.heads 6".split()], 4, "4 does not divide model.heads, 6"),
        (
            [*"--parallel.tensor 2 --model.width 384 --model.heads 6 --model.mlp_ratio 0.17".split()],
            2,
            "2 does not divide the hidden width of the MLP, 65",
        ),
        (["--parallel.replicas", "0"], 2, "parallel.replicas: must be at least 1, not 0"),
        (["--parallel.prefetch", "-1"], 2, "parallel.prefetch: must be at least 0, not -1"),
        (
            ["--parallel.tensor", "2", "--train.batch", "8"],
            6,
            "8 images do not divide over 3 ranks that see different ones; use 4 or 8 ranks, or a batch of 6 or 9",
        ),
    ],
)
def test_a_mesh_that_does_not_fit(tmp_path, arguments, ranks, message):
    assert message in refusal(tmp_path, *arguments, ranks=ranks)


def test_more_ranks_than_images(tmp_path):
    assert "use 2 ranks, or a batch of 5" in refusal(tmp_path, "--train.batch", "2", ranks=5)


def test_a_micro_batch_that_does_not_divide_names_the_nearest(tmp_path):
    text = refusal(tmp_path, "--train.batch", "128", "--train.micro_batch", "30")
    assert "share of 64 images; use 32" in text


def test_missing_data_is_named(tmp_path):
    assert "/nowhere" in refusal(tmp_path, "--data.source", "fashion_mnist", "--data.path", "/nowhere")


def test_heads_that_do_not_divide_the_width(tmp_path):
    assert "model.heads" in refusal(tmp_path, "--model.heads", "5")


def test_an_unknown_extractor(tmp_path):
    assert "no feature extractor" in refusal(tmp_path, "--score.every", "5", "--score.extractor", "fid")


def test_an_inception_without_its_file(tmp_path):
    text = refusal(tmp_path, "--score.every", "5", "--score.extractor", "inception-2015-12-05")
    assert "score.extractor" in text


def test_more_scored_images_than_held_out(tmp_path):
    assert "use 4 to 359" in refusal(tmp_path, "--score.every", "5", "--score.count", "400")
    assert "use 4 to 359" in refusal(tmp_path, "--score.every", "5", "--score.count", "2")


def test_an_extractor_of_other_images(tmp_path):
    assert "score.extractor" in refusal(tmp_path, "--score.every", "5", "--score.extractor", "fashion-mnist-cnn")


@pytest.mark.parametrize(
    "arguments",
    [["--optimizer.block_grid", "0"], ["--optimizer.bucket_mib", "1e-9"], ["--optimizer.ns_coefficients", "n5"]],
)
def test_an_option_that_the_optimizer_refuses(tmp_path, arguments):
    assert "optimizer: " in refusal(tmp_path, "--optimizer.name", "muon_bp", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path):
    assert "torch sees no GPU" in refusal(tmp_path, "--parallel.device", "cuda")


def test_a_run_folder_below_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    text = refusal(tmp_path, "--run.folder", str(tmp_path / "run" / "inner"))
    assert "is no folder that may be written to" in text


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    assert "holds other files" in refusal(tmp_path)


def test_a_run_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("x")
    assert "holds other files" in refusal(tmp_path)


def test_a_config_of_somebody_else_does_not_make_a_run_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("my: precious\n")
    assert "holds other files" in refusal(tmp_path)


def test_a_run_folder_in_use_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    with folder.locked(tmp_path / "run"):
        assert "another run is using" in refusal(tmp_path)
        with pytest.raises(ConfigError, match="another run is using"), folder.locked(tmp_path / "run"):
            pass
    assert plan(tmp_path).resume is not None


def test_ranks_that_look_at_the_folder_at_once_do_not_take_each_other_for_a_run(tmp_path):
    write_checkpoint(tmp_path)
    with folder.locked(tmp_path / "run"):
        pass
    with (tmp_path / "run" / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # a rank that is looking
        assert plan(tmp_path).resume is not None
        Timer(0.1, file.close).start()
        with folder.locked(tmp_path / "run"):  # and is done a moment later
            pass


@pytest.mark.parametrize("step", [20, 501])
def test_metrics_without_their_folder_of_checkpoints_are_not_dropped(tmp_path, step):
    made = write_checkpoint(tmp_path, 500)
    made.parent.rename(tmp_path / "run" / "checkpoints_bak")
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1}}\n')
    text = refusal(tmp_path)
    assert f"reaches step {step}" in text and "put it back" in text


def test_steps_whose_first_save_failed_or_was_cut_off_begin_anew(tmp_path):
    made = write_checkpoint(tmp_path, 500)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 700, "loss": 1}\n')  # made while the save was written
    made.rename(made.with_name("step_0000500.tmp"))
    assert plan(tmp_path).resume is None


@pytest.mark.parametrize("name", ["checkpoints", "samples", "tensorboard"])
def test_a_file_where_a_folder_belongs(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("# dit-train: a test\n")
    (tmp_path / "run" / name).write_text("x")
    assert f"{name} is not a folder; move it away" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "exit.json"])
def test_a_folder_where_a_file_belongs(tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("# dit-train: a test\n")
    assert f"{name} is not a file; move it away" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "nul\0byte", "dangling"])
def test_a_run_folder_that_cannot_be(tmp_path, name):
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "far")
    assert "run.folder: " in refusal(tmp_path, "--run.folder", str(tmp_path / name))


@pytest.mark.parametrize("arguments", [["--model.mlp_ratio", "1e300"], ["--model.mlp_ratio", "1e15"]])
def test_a_model_beyond_all_memory(tmp_path, arguments):
    assert "model: " in refusal(tmp_path, *arguments)


def test_a_held_out_set_that_is_too_small_to_score(tmp_path):
    data = ["--data.source", "synthetic", "--data.image_size", "8", "--data.count", "10", "--data.classes", "1"]
    assert "needs 4 held-out images, but there are 2" in refusal(tmp_path, *data, "--score.every", "5")


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 5)
    made_at = write_checkpoint(tmp_path, 10)
    made = plan(tmp_path)
    assert (made.resume.folder, made.resume.state.step) == (made_at, 10)
    assert plan(tmp_path, "--train.steps", "10").finished


def test_an_interrupted_save_is_passed_over(tmp_path):
    made_at = write_checkpoint(tmp_path, 10)
    (made_at.parent / "step_0000020.tmp").mkdir()
    assert plan(tmp_path).resume.state.step == 10


@pytest.mark.parametrize(
    "damage",
    ["truncate", "remove part", "remove state", "garble state", "empty state", "another step"],
)
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path, damage):
    write_checkpoint(tmp_path, 5)
    made_at = write_checkpoint(tmp_path, 10)
    part, state = made_at / "part.distcp", made_at / "state.json"
    if damage == "truncate":
        part.write_bytes(b"12")
    elif damage == "remove part":
        part.unlink()
    elif damage == "remove state":
        state.unlink()
    elif damage == "another step":
        made_at.rename(made_at.with_name("step_0000011"))
        made_at = made_at.with_name("step_0000011")
    else:
        state.write_text("{" if damage == "garble state" else "{}")
    before = sorted(path.name for path in made_at.iterdir())
    text = refusal(tmp_path)
    assert str(made_at) in text and "damaged checkpoint" in text and "remove that folder" in text
    assert sorted(path.name for path in made_at.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "now", "before"),
    [
        (["--model.width", "32"], "model.width: 32, but", "64"),
        (["--model.depth", "3"], "model.depth: 3, but", "1"),
        (["--model.heads", "2"], "model.heads: 2, but", "4"),
        (["--model.swiglu", "true"], "model.swiglu: True, but", "False"),
        (["--model.label_dropout", "0.5"], "model.label_dropout: 0.5, but", "0.1"),
        (["--objective.timesteps", "uniform"], "objective.timesteps: 'uniform', but", "'logit_normal'"),
        (["--train.seed", "3"], "train.seed: 3, but", "0"),
        (["--train.batch", "64"], "train.batch: 64, but", "128"),
        (["--optimizer.name", "muon"], "optimizer.name: 'muon', but", "'adamw'"),
        (["--data.source", "synthetic", "--data.image_size", "8"], "data.source: 'synthetic', but", "'digits'"),
        (["--data.heldout_every", "4"], "data.heldout_every: 4, but", "5"),
    ],
)
def test_a_resume_that_would_be_another_model_shows_both_values(tmp_path, arguments, now, before):
    write_checkpoint(tmp_path, 10)
    text = refusal(tmp_path, *arguments)
    assert text.startswith(now) and f"was trained with {before};" in text


def test_a_resume_on_other_images_is_refused(tmp_path):
    write_checkpoint(tmp_path, 10, **{"data (train_count)": 99})
    assert "data (train_count): 1438, but" in refusal(tmp_path)


def test_a_folder_of_ones_own_beside_the_checkpoints_is_none(tmp_path):
    made_at = write_checkpoint(tmp_path, 10)
    (made_at.parent / "step_0000090_best").mkdir()
    assert plan(tmp_path).resume.state.step == 10


def test_a_stop_before_the_last_evaluation_is_not_the_end(tmp_path):
    made_at = write_checkpoint(tmp_path, 10)
    content = manifest.read(made_at)
    manifest.write(made_at, replace(content, run=replace(content.run, evaluated=False)))
    assert not plan(tmp_path, "--train.steps", "10").finished


def test_a_resume_may_change_length_and_rate(tmp_path):
    write_checkpoint(tmp_path, 10)
    assert plan(tmp_path, "--train.steps", "900", "--optimizer.lr", "1", ranks=4).resume is not None


def test_whether_unreadable_images_are_replaced_may_be_decided_later(tmp_path):
    write_checkpoint(tmp_path)
    assert plan(tmp_path, "--data.unreadable", "replace").resume.state.step == 10


@pytest.mark.parametrize(("seconds", "shutdown"), [(0.0, 300), (20.0, 300), (150.5, 452)])
def test_ranks_have_the_time_of_three_measured_saves_to_stop(tmp_path, seconds, shutdown):
    where = write_checkpoint(tmp_path)
    found = manifest.read(where)
    found.run.save_seconds = seconds
    manifest.write(where, found)
    assert shutdown_seconds(plan(tmp_path)) == shutdown
