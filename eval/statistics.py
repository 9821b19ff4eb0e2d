"""Mean and covariance of features, summed in fp64 so that parts can be added up exactly."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eval.ranks import communication_device, world


def fp64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU instead of ``mps``, which has no fp64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


class GaussianStats:
    """Number, sum and sum of outer products of feature vectors of length d.

    Sums can be merged in any order and over any number of ranks; averages of per-rank scores cannot. They are kept in
    fp64: in fp32 a mean far from zero cancels the covariance away.

    Args:
        num_features: d.
        device: where the sums lie; one with fp64, see ``fp64_device``.
        meta: what the features are of, as JSON values; travels with ``save`` and ``load``.
    """

    def __init__(self, num_features: int, device: str | torch.device = "cpu", meta: dict[str, Any] | None = None):
        self.num_features = num_features
        self.n = 0
        self.sum = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.outer = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self.meta = dict(meta or {})
        self._pooled = False
        self._root: Tensor | None = None

    def update(self, features: Tensor) -> None:
        """Add features [N, d] of any float dtype and device; N may be 0.

        Raises:
            ValueError: another shape than [N, d], or values that are not finite.
            RuntimeError: the sums were pooled over ranks already.
        """
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise ValueError(f"features must be [N, {self.num_features}], not {list(features.shape)}")
        if not torch.isfinite(features).all():
            raise ValueError("features hold NaN or infinity")
        if self._pooled:
            raise RuntimeError("these sums are pooled over all ranks already; start a new GaussianStats")
        self._root = None
        x = features.to(self.sum.device).double()
        self.n += len(x)
        self.sum += x.sum(0)
        self.outer += x.T @ x

    def merge(self, other: "GaussianStats") -> None:
        """Add the sums of ``other``, which stays as it is."""
        if other.num_features != self.num_features:
            raise ValueError(f"cannot merge {other.num_features} features into {self.num_features}")
        self._root = None
        self.n += other.n
        self.sum += other.sum.to(self.sum.device)
        self.outer += other.outer.to(self.outer.device)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace the sums by those over all ranks of ``group``; every rank calls it, also one without any features.

        Does nothing without a process group.

        Raises:
            RuntimeError: called twice, which would count every feature once per rank.
        """
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
        if self.n < 1:
            raise ValueError("a mean needs at least 1 feature vector, got 0")
        return self.sum / self.n

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance (divisor n - 1), fp64 [d, d], exactly symmetric. Raises ValueError for n < 2."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 feature vectors, got {self.n}")
        scatter = self.outer - torch.outer(self.sum, self.mean)
        return (scatter + scatter.T) / (2 * (self.n - 1))

    @property
    def root(self) -> Tensor:
        """R, fp64 [d, rank], with R Rᵀ = covariance; directions whose variance is mere rounding are left out.

        Kept until features are added, since its eigendecomposition is the dear part of a Fréchet distance.

        Raises:
            ValueError: n < 2, or the sums hold NaN or infinity.
        """
        if self._root is None:
            covariance = self.covariance
            if not torch.isfinite(covariance).all():
                raise ValueError("the statistics hold NaN or infinity")
            values, vectors = torch.linalg.eigh(covariance)
            kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
            self._root = vectors[:, kept] * values[kept].sqrt()
        return self._root

    def save(self, path: str | Path, meta: dict[str, Any] | None = None) -> None:
        """Write ``mu``, ``sigma`` (the keys of the FID tools), ``n`` and ``meta`` as JSON to an ``.npz`` file.

        ``meta`` replaces the object's own. The file appears whole or not at all.
        """
        path = Path(path)
        text = json.dumps(self.meta if meta is None else meta)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with partial.open("wb") as file:
            np.savez(file, mu=self.mean.cpu().numpy(), sigma=self.covariance.cpu().numpy(), n=self.n, meta=text)
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "GaussianStats":
        """Read what ``save`` wrote; further features may be added.

        Raises:
            ValueError: a key is missing, or shapes do not belong together.
        """
        with np.load(path, allow_pickle=False) as file:
            missing = {"mu", "sigma", "n", "meta"} - set(file.files)
            if missing:
                raise ValueError(f"{path}: no {', '.join(sorted(missing))} in it; write it with GaussianStats.save")
            mu, sigma = (torch.from_numpy(file[key]).double().to(device) for key in ("mu", "sigma"))
            n, meta = int(file["n"]), json.loads(str(file["meta"]))
        if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
            raise ValueError(f"{path}: mu must be [d] and sigma [d, d], not {list(mu.shape)} and {list(sigma.shape)}")
        stats = cls(len(mu), device, meta)
        stats.n, stats.sum = n, mu * n
        stats.outer = sigma * (n - 1) + torch.outer(mu, mu) * n
        return stats
