"""Named ways of scoring. A number belongs to the protocol that gave it; across protocols nothing is compared.

                    network, resize                quantisation   labels    images   reference
    adm-imagenet256 Inception, TF1 bilinear        127.5x + 128↓  random    50,000   VIRTUAL_imagenet256_labeled.npz
    edm             Inception, TF1 bilinear        127.5x + 128↓  random    50,000   EDM's npz or pkl
    clean           Inception, antialiased bicubic rounded        random    50,000   clean-fid's npz, or your own
    torch-fidelity  Inception, TF1 bilinear        rounded        random    50,000   your own
    small           any                            rounded        reference as many  images held out from training

Sources: Dhariwal and Nichol 2021 (ADM evaluator); Karras et al. 2022 (EDM); Parmar et al. 2022 (clean-fid); Obukhov et
al. 2020 (torch-fidelity). LDM, VAR and MAR take ADM's with exactly 50 images a class: ``labels="balanced"``, which the
record says.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from eval.extractors import FeatureExtractor

Labels = Literal["random", "balanced", "reference"]

INCEPTION = "inception-2015-12-05"
CLEAN = f"{INCEPTION}@bicubic-antialias-299"


@dataclass(frozen=True)
class Protocol:
    """What has to be fixed before a number means anything.

    Attributes:
        name: as in records and tables.
        extractor: its name, which says its resize too; None for any.
        quantize: rule of ``eval.generate.quantize``.
        labels: classes of generated images: drawn uniformly by index, i mod classes, or those of the reference.
        count: images; None for as many as the reference holds.
        reference: the real images that published numbers are against; which ones a score took, its record says beside.
        splits: of the Inception Score; 0 takes none.
        spatial: whether sFID belongs to it.
        neighbours: k of precision and recall; 0 takes none.
        equal_n: whether precision and recall want equally many images on both sides.
        keep: features are kept of so many images, for KID, precision and recall.
    """

    name: str
    extractor: str | None
    quantize: str
    labels: Labels
    count: int | None
    reference: str
    splits: int = 0
    spatial: bool = False
    neighbours: int = 3
    equal_n: bool = True
    keep: int = 10_000

    def check(self, extractor: FeatureExtractor) -> None:
        """Raise ValueError where images were seen through something else than the protocol says."""
        if self.extractor is not None and extractor.name != self.extractor:
            raise ValueError(f"protocol {self.name} scores with {self.extractor}, not {extractor.name}")


PROTOCOLS = {
    one.name: one
    for one in (
        Protocol(
            "adm-imagenet256",
            INCEPTION,
            "adm",
            "random",
            50_000,
            "VIRTUAL_imagenet256_labeled.npz",
            10,
            spatial=True,
            equal_n=False,
            keep=50_000,
        ),
        Protocol("edm", INCEPTION, "edm", "random", 50_000, "EDM's npz or pkl", neighbours=0),
        Protocol("clean", CLEAN, "round", "random", 50_000, "clean-fid's npz, or your own", neighbours=0),
        Protocol("torch-fidelity", INCEPTION, "round", "random", 50_000, "your own", 10),
        Protocol("small", None, "round", "reference", None, "images held out from training"),
    )
}


def protocol(name: str) -> Protocol:
    """The protocol of that name. Raises ValueError with the nearest name for an unknown one."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    near = get_close_matches(name, PROTOCOLS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"no protocol is named {name!r}{hint} known are {', '.join(PROTOCOLS)}".replace("? known", "? Known")
    )
