"""The law of t, its strata and its independence of ranks."""

import numpy as np
import pytest
import torch

from dit_train.config import ObjectiveConfig
from dit_train.diffusion.timesteps import T_MIN, draw_timesteps, evenly_spaced, quantile, strata

LOGIT_NORMAL, UNIFORM = ObjectiveConfig(), ObjectiveConfig(timesteps="uniform")


def test_every_stratum_of_the_global_batch_is_hit_once():
    u = strata(seed=0, step=3, global_batch=257)
    assert u.dtype == torch.float64
    assert sorted((u * 257).floor().long().tolist()) == list(range(257))
    assert u.tolist() != sorted(u.tolist())


def test_times_are_a_function_of_seed_and_step():
    first = draw_timesteps(LOGIT_NORMAL, 0, 7, 64)
    assert torch.equal(first, draw_timesteps(LOGIT_NORMAL, 0, 7, 64))
    assert not torch.equal(first, draw_timesteps(LOGIT_NORMAL, 0, 8, 64))
    assert not torch.equal(first, draw_timesteps(LOGIT_NORMAL, 1, 7, 64))
    assert first.dtype == torch.float32


def test_a_sample_meets_all_times_over_the_steps():
    first = np.array([draw_timesteps(UNIFORM, 0, step, 16)[0].item() for step in range(400)])
    assert first.mean() == pytest.approx(0.5, abs=0.06)  # std of the mean is 0.0144
    assert first.std() == pytest.approx(12**-0.5, abs=0.03)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.4, 1.3)])
def test_logit_normal_has_its_mean_and_deviation(mean, std):
    t = draw_timesteps(ObjectiveConfig(logit_mean=mean, logit_std=std), 0, 0, 4096)
    assert torch.logit(t.double()).mean().item() == pytest.approx(mean, abs=0.01)
    assert torch.logit(t.double()).std().item() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize("config", [LOGIT_NORMAL, UNIFORM, ObjectiveConfig(logit_std=100.0)])
def test_times_keep_off_the_ends(config):
    t = quantile(config, torch.tensor([0.0, 1e-300, 0.5, 1 - 1e-16, 1.0], dtype=torch.float64))
    assert t.min() > 0.9 * T_MIN
    assert t.max() < 1
    assert torch.isfinite(t).all()


def test_evaluation_times_are_the_middles_of_the_strata():
    torch.testing.assert_close(evenly_spaced(UNIFORM, 4), torch.tensor([0.125, 0.375, 0.625, 0.875]))
    t = evenly_spaced(LOGIT_NORMAL, 101)
    assert (t.diff() > 0).all()
    torch.testing.assert_close(t + t.flip(0), torch.ones(101))
    assert t[50].item() == pytest.approx(0.5)
