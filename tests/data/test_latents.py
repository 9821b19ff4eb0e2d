"""Latents are those of diffusers, shifted and scaled once on the way in and once on the way out."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dit_train import overlays
from dit_train.config import ConfigError, DataConfig
from dit_train.data import autoencoder, folder, sources
from dit_train.run.batch import draw, heldout, share
from dit_train.run.sampling import decoder
from scripts import encode_latents
from tests.vae import CLASSES, EACH, SCALE, SHIFT, SIDE, command, save_images, save_vae


@pytest.fixture(autouse=True)
def no_process_group_left():
    """A command that refuses leaves its group to the end of its process; here it goes on."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """vae/, images/, latents/ of them in fp32, and flipped/ in fp16 with mirrored ones."""
    root = tmp_path_factory.mktemp("latents")
    save_vae(root / "vae")
    save_images(root / "images")
    assert encode_latents.main(command(root / "images", root / "vae", root / "latents", "--dtype", "fp32")) == 0
    assert encode_latents.main(command(root / "images", root / "vae", root / "flipped", "--flip")) == 0
    return root


@pytest.fixture(scope="module")
def vae(made):
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(made / "vae", local_files_only=True).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def posteriors(made, vae):
    """What diffusers itself says of all images in the order of the listing, one by one."""
    names = [name for names in folder.listing(str(made / "images"), "").values() for name in names]
    pixels = torch.stack([torch.from_numpy(folder.decode(name, SIDE).copy()) for name in names])
    return pixels, vae.encode(pixels / 127.5 - 1).latent_dist


def config(made, name="latents", **more) -> DataConfig:
    return DataConfig(source="latents", path=str(made / name), **{"heldout_every": 5, **more})


def refusal(settings: DataConfig, when=sources.check) -> str:
    with pytest.raises(ConfigError) as caught:
        when(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files(where):
    return {path.name: path.read_bytes() for path in where.iterdir()}


def test_stored_moments_are_those_of_diffusers_neither_shifted_nor_scaled(made, posteriors):
    _, posterior = posteriors
    manifest = json.loads((made / "latents" / "manifest.json").read_text())
    stored = np.concatenate([np.load(made / "latents" / part["file"]) for part in manifest["parts"]])
    np.testing.assert_allclose(stored, posterior.parameters.numpy(), atol=1e-5)
    assert [part["count"] for part in manifest["parts"]] == [9] * 6 + [6] and manifest["latent_shape"] == [4, 8, 8]
    sampled = (posterior.mean.double().square() + posterior.var.double()).mean((0, 2, 3))
    mean = posterior.mean.double().mean((0, 2, 3))
    np.testing.assert_allclose(manifest["latent_mean"], mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(manifest["latent_std"], (sampled - mean**2).sqrt().numpy(), rtol=1e-5)
    assert manifest["settings"]["vae"]["scale"] == [SCALE] * 4 and manifest["settings"]["vae"]["shift"] == [SHIFT] * 4


def test_what_a_model_sees_is_shifted_and_scaled_once_and_decoded_by_the_same(made, vae, posteriors):
    data = sources.load(config(made, vae=str(made / "vae")))
    assert (data.channels, data.image_size, data.image_shape) == (4, 8, (3, SIDE, SIDE))
    seen = data.train.inputs(range(48), 0, 0, samples=range(48))
    assert seen.dtype == torch.float32
    _, posterior = posteriors
    rows = data.train.rows
    noise = ((seen / SCALE + SHIFT) - posterior.mean[rows]) / posterior.std[rows]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02  # the posterior's own law, not twice as wide
    assert 0.5 < seen.std() < 2
    ours = decoder(config(made, vae=str(made / "vae")), data, torch.device("cpu"))(seen[:20])
    torch.testing.assert_close(ours, vae.decode(seen[:20] / SCALE + SHIFT).sample, atol=1e-5, rtol=1e-5)


def test_statistics_of_each_channel_take_the_place_of_one_shift_and_scale(made, tmp_path):
    where = shutil.copytree(made / "vae", tmp_path / "other")
    settings = json.loads((where / "config.json").read_text())
    settings |= {"latents_mean": [1, 2, 3, 4], "latents_std": [2, 2, 4, 4], "scaling_factor": 0.5, "shift_factor": None}
    (where / "config.json").write_text(json.dumps(settings))
    found = autoencoder.inspect(where)
    assert (found.shift, found.scale) == ((1, 2, 3, 4), (0.25, 0.25, 0.125, 0.125))
    encoded = shutil.copytree(made / "latents", tmp_path / "latents")
    assert encode_latents.main(command(made / "images", where, encoded, "--dtype", "fp32")) == 0
    assert files(encoded).keys() == files(made / "latents").keys()
    one, other = (sources.load(config(root)).train.inputs([3], 0, samples=range(1)) for root in (made, tmp_path))
    raw = one / SCALE + SHIFT
    expected = (raw - torch.tensor([1.0, 2, 3, 4]).view(4, 1, 1)) / torch.tensor([4.0, 4, 8, 8]).view(4, 1, 1)
    torch.testing.assert_close(other, expected)


def test_images_of_latents_are_decoded_means_or_those_that_were_encoded(made, vae, posteriors):
    pixels, posterior = posteriors
    decoded = sources.load(config(made, vae=str(made / "vae")))
    rows = decoded.heldout.rows
    assert len(rows) == CLASSES * EACH // 5
    plain = vae.decode(posterior.mean[rows]).sample.clamp(-1, 1).mul(127.5).add(127.5)
    images = decoded.heldout.images(range(len(rows)))
    assert images.dtype == torch.uint8 and (images.float() - plain).abs().max() <= 0.51
    real = sources.load(config(made, images=str(made / "images")))
    assert torch.equal(real.heldout.images(range(len(rows))), pixels[rows])
    assert (decoded.image_name, real.image_name) == ("decoded latents", "encoded images")
    assert torch.equal(real.heldout.labels([0, 11]), torch.tensor([0, 2]))


def test_half_of_the_training_latents_are_mirrored_and_none_held_out(made, vae, posteriors):
    data = sources.load(config(made, "flipped"))
    pixels, posterior = posteriors
    turned = vae.encode(pixels.flip(-1) / 127.5 - 1).latent_dist.mean
    share_turned = []
    for part, parts in ((data.train, 6), (data.heldout, 2)):
        everything = range(len(part))
        seen = torch.stack([part.inputs(everything, 0, k, samples=everything) for k in range(parts)]) / SCALE + SHIFT
        far = [(seen - means[part.rows]).square().flatten(2).sum(2) for means in (posterior.mean, turned)]
        share_turned.append((far[1] < far[0]).float().mean().item())
    assert 0.35 < share_turned[0] < 0.65 and share_turned[1] < 0.1


def test_posterior_noise_depends_on_seed_step_and_slot_alone(made):
    words = ["--data.source", "latents", "--data.path", str(made / "flipped"), "--train.batch", "12"]
    settings = overlays.read([], words)
    data = sources.load(settings.data)

    def shown(step, rank=0, ranks=1, settings=settings):
        batch = draw(settings, data, step, share(12, rank, ranks))
        return batch.x_t - batch.t.view(-1, 1, 1, 1) * batch.target

    for ranks in (2, 3):
        assert torch.equal(torch.cat([shown(3, rank, ranks) for rank in range(ranks)]), shown(3))
    assert not torch.equal(shown(3), shown(3, settings=overlays.read([], [*words, "--train.seed", "1"])))
    one, two = (data.train.inputs([5], 0, step, samples=[7]) for step in (0, 1))
    assert not torch.equal(one, two) and torch.equal(one, data.train.inputs([5], 0, 0, samples=[7]))
    times = np.full(2, 0.5, np.float32)
    pair, alone = heldout(0, data, np.array([4, 2]), times), heldout(0, data, np.array([2]), times[:1])
    assert torch.equal(pair.x_t[1], alone.x_t[0])


def test_encoding_goes_on_with_the_bytes_of_one_that_was_not_stopped(made, tmp_path, capsys, monkeypatch):
    out = tmp_path / "latents"
    arguments = command(made / "images", made / "vae", out, "--dtype", "fp32")
    encode, calls = autoencoder.Autoencoder.moments, []

    def full_disk(self, images):
        calls.append(len(images))
        if len(calls) == 8:
            raise OSError("no space left")
        return encode(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(autoencoder.Autoencoder, "moments", full_disk)
        assert encode_latents.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert "not finished" in refusal(config(tmp_path))
    (out / "part-00001.npy").write_bytes((out / "part-00001.npy").read_bytes()[:-5])  # cut short by a power cut
    assert encode_latents.main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    assert "51 made now" in capsys.readouterr().out  # of 60, one part of 9 was there
    assert files(out) == files(made / "latents")
    assert (tmp_path / "found.json").read_bytes() == (out / "manifest.json").read_bytes()
    assert encode_latents.main(arguments) == 0 and "0 made now" in capsys.readouterr().out


def test_a_signal_stops_within_a_part_and_what_is_whole_stays(made, tmp_path, monkeypatch, capsys):
    encode, calls = autoencoder.Autoencoder.moments, []

    def signalled(self, images):
        calls.append(len(images))
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return encode(self, images)

    monkeypatch.setattr(autoencoder.Autoencoder, "moments", signalled)
    arguments = command(made / "images", made / "vae", tmp_path / "latents", "--dtype", "fp32")
    assert encode_latents.main(arguments) == 85 and "the same command goes on" in capsys.readouterr().out
    assert sorted(files(tmp_path / "latents")) == ["labels.npy", "manifest.json", "part-00000.npy"]
    assert encode_latents.main(arguments) == 0 and files(tmp_path / "latents") == files(made / "latents")


def test_a_folder_of_other_settings_is_left_alone(made, tmp_path, capsys):
    def refused(*changes, images=made / "images", vae=made / "vae", out=made / "latents"):
        before = files(out) if out.is_dir() else None
        assert encode_latents.main([*command(images, vae, out, "--dtype", "fp32"), *map(str, changes)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("encode_latents.py: ")
        assert before is None or files(out) == before
        return lines[0]

    assert "was begun with mirrored False, now it is True" in refused("--flip")
    assert "was begun with batch 4, now it is 5" in refused("--batch", 5)
    assert "was begun with encoder" in refused(vae=save_vae(tmp_path / "other", seed=1))
    fewer = shutil.copytree(made / "images", tmp_path / "fewer")
    next((fewer / "shape 1").iterdir()).unlink()
    assert "was begun with names_sha256" in refused(images=fewer)
    assert "holds other files" in refused(out=made / "vae")
    assert "no multiple of 2" in refused("--image-size", 15, out=tmp_path / "new")
    assert "no autoencoder" in refused(vae=made / "images", out=tmp_path / "new")
    assert "is no folder" in refused(images=tmp_path / "none", out=tmp_path / "new")
    assert "must end in .json" in refused("--json", tmp_path / "a.txt", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (fewer / "shape 1" / "0000.png").write_bytes(b"\x89PNG")
    assert "0000.png cannot be read" in refused(images=fewer, out=tmp_path / "new")


def test_autoencoders_that_cannot_be_used_are_refused(made, tmp_path):
    where = shutil.copytree(made / "vae", tmp_path / "vae")
    settings, weights = (where / "config.json").read_text(), where / autoencoder.WEIGHTS

    def inspected(**changes):
        (where / "config.json").write_text(json.dumps(json.loads(settings) | changes))
        with pytest.raises(ConfigError) as caught:
            autoencoder.inspect(where)
        return str(caught.value)

    assert "holds a AutoencoderDC" in inspected(_class_name="AutoencoderDC")
    assert "of 1 channels, not RGB" in inspected(in_channels=1)
    assert "must have 4 numbers" in inspected(latents_mean=[1], latents_std=[1])
    whole = weights.read_bytes()
    for count in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:count])
        assert "damaged" in inspected()
    weights.rename(weights.with_suffix(".bin"))
    assert "safe_serialization" in inspected()


def test_latents_that_cannot_be_read_are_refused(made, tmp_path):
    assert "need one" in refusal(DataConfig(source="latents"))
    assert "holds no latents" in refusal(config(tmp_path, "none"))
    assert "leave it out" in refusal(DataConfig(vae=str(made / "vae")))
    assert "16 pixels" in refusal(config(made, image_size=32))
    assert "no autoencoder" in refusal(config(made, vae=str(made)))
    assert "name " + str(made / "vae") in refusal(config(made, vae=str(made)))
    assert "another encoder" in refusal(config(made, vae=str(save_vae(tmp_path / "other", seed=1))))
    other = save_images(tmp_path / "images")
    (other / "shape 0" / "0000.png").rename(other / "shape 0" / "9999.png")
    assert "other images than were encoded" in refusal(config(made, images=str(other)))
    assert "data.vae" in refusal(config(made), when=lambda settings: sources.load(settings).heldout.images([0]))
    broken = shutil.copytree(made / "latents", tmp_path / "broken")
    part = broken / "part-00002.npy"
    part.write_bytes(part.read_bytes()[:-1])
    assert "damaged" in refusal(config(tmp_path, "broken"))
    np.save(part, np.zeros((9, 8, 8, 8), np.int32))
    assert "part-00002.npy is int32" in refusal(config(tmp_path, "broken"))
    part.write_bytes((made / "latents" / "part-00002.npy").read_bytes())
    np.save(broken / "labels.npy", np.full(60, 3))
    assert "labels.npy" in refusal(config(tmp_path, "broken"))
    shutil.copy(made / "latents" / "labels.npy", broken)
    manifest = json.loads((made / "latents" / "manifest.json").read_text())
    for parts in ([], manifest["parts"][:-1], [*manifest["parts"], {**manifest["parts"][0], "mirrored": True}]):
        (broken / "manifest.json").write_text(json.dumps(manifest | {"parts": parts}))
        assert "damaged" in refusal(config(tmp_path, "broken"))
    (broken / "manifest.json").write_text("[]")
    assert "is damaged" in refusal(config(tmp_path, "broken"))
