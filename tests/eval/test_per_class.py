import json

import pytest
import torch

from eval.frechet import frechet
from eval.kernel import kid
from eval.per_class import per_class
from eval.statistics import GaussianStats

D = 6


def cloud(n, seed):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


def labelled(counts, seed):
    labels = torch.repeat_interleave(torch.tensor(list(counts)), torch.tensor(list(counts.values())))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return cloud(len(labels), seed), labels[order]


def test_each_class_is_scored_by_its_own_images():
    (x, x_labels), (y, y_labels) = labelled({0: 30, 1: 40}, 0), labelled({0: 35, 1: 25}, 1)
    x[x_labels == 1] += 2
    rows = per_class(x, x_labels, y, y_labels, names=("cat", "dog"))
    assert [(row["class"], row["name"], row["n_gen"], row["n_ref"]) for row in rows] == [
        (0, "cat", 30, 35),
        (1, "dog", 40, 25),
    ]
    for row in rows:
        pair = x[x_labels == row["class"]], y[y_labels == row["class"]]
        assert (row["kid"], row["kid_standard_error"]) == kid(*pair)
        assert row["frechet"] == frechet(*map(GaussianStats.of, pair)) and row["note"] is None
    assert rows[1]["frechet"] > 5 * rows[0]["frechet"]


def test_what_cannot_be_scored_is_said():
    (x, x_labels), (y, y_labels) = labelled({0: 30, 1: 5, 2: 3, 4: 9}, 2), labelled({0: 30, 1: 30, 2: 30, 3: 9}, 3)
    rows = {row["class"]: row for row in per_class(x, x_labels, y, y_labels, names=list("abcdef"))}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert rows[1]["kid"] is not None and rows[1]["frechet"] is None
    assert rows[1]["note"] == "no Fréchet distance: 5 images for 6 features"
    assert rows[2]["kid"] is None and rows[2]["note"] == "3 images: KID needs 4"
    assert [rows[i]["note"] for i in (3, 4, 5)] == [
        "no generated images",
        "no reference images",
        "no generated and no reference images",
    ]
    json.dumps(list(rows.values()), allow_nan=False)
    assert [row["class"] for row in per_class(x, x_labels, y, y_labels)] == [0, 1, 2, 3, 4]


def test_labels_that_do_not_fit_raise():
    x, labels = labelled({0: 5, 1: 5}, 4)
    with pytest.raises(ValueError, match="10 features but labels"):
        per_class(x, labels[:9], x, labels)
    with pytest.raises(TypeError, match="integers"):
        per_class(x, labels.float(), x, labels)
    with pytest.raises(ValueError, match="but 1 class names"):
        per_class(x, labels, x, labels, names=["only"])
    with pytest.raises(ValueError, match="NaN"):
        per_class(x / 0, labels, x, labels)
