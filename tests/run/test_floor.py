"""The floor shows as many training images of the same classes as the samples that it is held against."""

import numpy as np
import torch

from dit_train.config import DataConfig
from dit_train.data import sources
from dit_train.run.references import draw_like

DATA = sources.load(DataConfig())


def test_the_floor_has_the_classes_of_the_reference():
    labels = DATA.heldout.labels(np.arange(len(DATA.heldout)))
    drawn = draw_like(labels, DATA.train, "a")
    assert len(np.unique(drawn)) == len(labels)
    assert torch.equal(DATA.train.labels(drawn).bincount(), labels.bincount())
    assert not np.array_equal(drawn, draw_like(labels, DATA.train, "b"))


def test_a_class_of_which_there_are_too_few_is_filled_up():
    labels = torch.zeros(200, dtype=torch.int64)
    drawn = draw_like(labels, DATA.train, "a")
    found = DATA.train.labels(drawn)
    assert len(np.unique(drawn)) == 200
    assert (found == 0).sum() == (DATA.train.labels(np.arange(1438)) == 0).sum() < 200
