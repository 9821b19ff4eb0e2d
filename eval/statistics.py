"""Mean and covariance of features, summed in fp64 so that parts can be added up exactly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eval import statistics_file
from eval.files import replacing
from eval.ranks import communication_device, world

ROWS = 4096  # feature vectors converted to fp64 at once
STRIP = 512  # rows of Σxxᵀ summed at once, each from its diagonal on: at d = 2048 five eighths of the products


def fp64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU instead of ``mps``, which has no fp64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


class GaussianStats:
    """Number, sum and sum of outer products of feature vectors of length d.

    Sums can be merged in any order and over any number of ranks; averages of per-rank scores cannot. They are kept in
    fp64: in fp32 a mean far from zero cancels the covariance away. Of the sum of outer products only the upper triangle
    counts; what lies below the diagonal is left unspecified.

    Statistics that were read from a file without a count have ``n`` None: their mean, covariance and root are as good
    as others, but nothing can be added to them.

    Args:
        num_features: d.
        device: where the sums lie; one with fp64, see ``fp64_device``.
        meta: what the features are of, as JSON values; travels with ``save`` and ``load``.
    """

    def __init__(self, num_features: int, device: str | torch.device = "cpu", meta: dict[str, Any] | None = None):
        self.num_features = num_features
        self.n: int | None = 0
        self.sum = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.outer = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self.meta = dict(meta or {})
        self._pooled = False
        self._root: Tensor | None = None
        self._given: tuple[Tensor, Tensor] | None = None  # mean and covariance, where the count is unknown

    @classmethod
    def of(cls, features: Tensor, device: str | torch.device | None = None) -> "GaussianStats":
        """Statistics of features [n, d], summed on ``device``, or where the features lie if that has fp64."""
        if features.ndim != 2:
            raise ValueError(f"features must be [n, d], not {list(features.shape)}")
        stats = cls(features.shape[1], fp64_device(features.device) if device is None else device)
        stats.update(features)
        return stats

    @classmethod
    def given(
        cls, mean: Tensor, covariance: Tensor, n: int | None = None, meta: dict[str, Any] | None = None
    ) -> "GaussianStats":
        """Statistics with this mean [d] and unbiased covariance [d, d], fp64 on the device of both.

        ``n`` is how many vectors they are of; None where nobody knows.
        """
        stats = cls(len(mean), mean.device, meta)
        stats.n = n
        if n is None:
            stats._given = mean, (covariance + covariance.T) / 2
            stats.sum.fill_(float("nan"))
            stats.outer = stats.sum.expand(len(mean), -1)
        else:
            stats.sum = mean * n
            stats.outer = covariance * (n - 1) + torch.outer(mean, stats.sum)
        return stats

    def update(self, features: Tensor) -> None:
        """Add features [N, d] of any float dtype and device; N may be 0.

        Raises:
            ValueError: another shape than [N, d], or values that are not finite.
            RuntimeError: the sums were pooled over ranks already, or have no count.
        """
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise ValueError(f"features must be [N, {self.num_features}], not {list(features.shape)}")
        blocks = features.detach().to(self.sum.device).split(ROWS)
        total = torch.stack([block.double().sum(0) for block in blocks]).sum(0)
        if not torch.isfinite(total).all():  # d numbers to look at instead of N·d; one NaN spoils its sum
            raise ValueError("features hold NaN or infinity")
        if self._pooled:
            raise RuntimeError("these sums are pooled over all ranks already; start a new GaussianStats")
        self._check_counted()
        self._root = None
        self.n += len(features)
        self.sum += total
        for block in blocks:
            add_outer(self.outer, block.double())

    def merge(self, other: "GaussianStats") -> None:
        """Add the sums of ``other``, which stays as it is.

        Raises:
            ValueError: unlike numbers of features.
            RuntimeError: one of the two has no count.
        """
        if other.num_features != self.num_features:
            raise ValueError(f"cannot merge {other.num_features} features into {self.num_features}")
        self._check_counted()
        other._check_counted()
        self._root = None
        self.n += other.n
        self.sum += other.sum.to(self.sum.device)
        self.outer += other.outer.to(self.outer.device)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace the sums by those over all ranks of ``group``; every rank calls it, also one without any features.

        Does nothing without a process group.

        Raises:
            RuntimeError: called twice, which would count every feature once per rank; or they have no count.
        """
        self._check_counted()
        if self._pooled:
            raise RuntimeError("these sums are pooled over all ranks already")
        self._pooled = True
        if world(group)[1] == 1:
            return
        self._root = None
        count = self.sum.new_tensor([self.n])  # exact in fp64 up to 2^53
        packed = torch.cat((count, self.sum, self.outer.flatten())).to(communication_device(group))
        dist.all_reduce(packed, group=group)
        packed = packed.to(self.sum.device)
        self.n = int(packed[0])
        self.sum = packed[1 : 1 + self.num_features]
        self.outer = packed[1 + self.num_features :].view(self.num_features, -1)

    @property
    def mean(self) -> Tensor:
        """Mean, fp64 [d]. Raises ValueError without features."""
        if self._given:
            return self._given[0]
        if self.n < 1:
            raise ValueError("a mean needs at least 1 feature vector, got 0")
        return self.sum / self.n

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance (divisor n - 1), fp64 [d, d], exactly symmetric. Raises ValueError for n < 2."""
        if self._given:
            return self._given[1]
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 feature vectors, got {self.n}")
        upper = (self.outer - torch.outer(self.sum, self.mean)).triu_() / (self.n - 1)
        return upper + upper.triu(1).T

    @property
    def root(self) -> Tensor:
        """R, fp64 [d, rank], with R Rᵀ = covariance; directions whose variance is mere rounding are left out.

        Kept until features are added, since its eigendecomposition is the dear part of a Fréchet distance.

        Raises:
            ValueError: n < 2, the sums hold NaN or infinity, or the covariance was given and is none.
        """
        if self._root is None:
            covariance = self.covariance
            if not torch.isfinite(covariance).all():
                raise ValueError("the statistics hold NaN or infinity")
            values, vectors = torch.linalg.eigh(covariance)
            rounding = max(1e-3 * values[-1], 1e-9 * self.mean.square().max())  # of half precision, and of a constant
            if values[0] < -rounding:
                raise ValueError(
                    f"sigma is no covariance: it has the eigenvalues {values[0]:.3g} and {values[-1]:.3g}; make it anew"
                )
            kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
            self._root = vectors[:, kept] * values[kept].sqrt()
        return self._root

    def save(self, path: str | Path, meta: dict[str, Any] | None = None) -> None:
        """Write ``mu``, ``sigma`` (the keys of the FID tools), ``n`` and ``meta`` as JSON to an ``.npz`` file.

        ``meta`` replaces the object's own. Without a count there is no ``n``. The file appears whole or not at all.
        """
        path = Path(path)
        arrays = {"mu": self.mean.cpu().numpy(), "sigma": self.covariance.cpu().numpy()}
        if self.n is not None:
            arrays["n"] = np.array(self.n)
        text = json.dumps(self.meta if meta is None else meta)
        with replacing(path) as file:
            np.savez(file, **arrays, meta=np.array(text))

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device = "cpu", spatial: bool = False, metric: str = "fid"
    ) -> "GaussianStats":
        """Read what ``save`` wrote, or a reference file of another tool; see ``eval.statistics_file.read``.

        ``n`` is None where the file has no count. To statistics with a count further features may be added.

        Args:
            path: ``.npz``, or ``.pkl`` of EDM2.
            device: where they go.
            spatial: ADM's second pair, of the spatial features of sFID, instead of the first.
            metric: which pair of a ``.pkl``.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not statistics; ``OnlyImagesError`` where the file holds images to extract features of.
        """
        mean, covariance, n, meta = statistics_file.read(path, spatial, metric)
        return cls.given(torch.from_numpy(mean).to(device), torch.from_numpy(covariance).to(device), n, meta)

    def _check_counted(self) -> None:
        if self.n is None:
            raise RuntimeError("these statistics came without a count: nothing can be added to them or they to others")


def add_outer(outer: Tensor, x: Tensor) -> None:
    """Add xᵀx to the upper triangle of ``outer`` [d, d] in place; x is fp64 [N, d]."""
    for start in range(0, len(outer), STRIP):
        outer[start : start + STRIP, start:].addmm_(x[:, start : start + STRIP].T, x[:, start:])
