"""Train the small classifier whose features score digits or Fashion-MNIST, on the training split alone.

    python scripts/train_classifier.py --data digits
    python scripts/train_classifier.py --data fashion_mnist --fashion-dir /usr/share/datasets/fashion-mnist

Prints the held-out accuracy and writes ``eval/weights/<name>-<first 8 hex digits of the SHA-256>.safetensors``.
--json FILE takes name, weights (the file), training and heldout (accuracies).
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dit_train import exits  # noqa: E402
from dit_train.command_line import Parser, new_file, refuse  # noqa: E402
from dit_train.config import DataConfig  # noqa: E402
from dit_train.data.sources import Source, load  # noqa: E402
from eval.extractors.classifier import digits_cnn, fashion_mnist_cnn  # noqa: E402


def arrays(source: Source) -> tuple[Tensor, Tensor]:
    """All images uint8 [N, 1, size, size] and labels int64 [N] of one part of the data."""
    return source.images(range(len(source))), source.labels(range(len(source)))


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by at most one pixel in either direction, which keeps the small network from overfitting."""
    padded = F.pad(images, (1, 1, 1, 1))
    size = images.shape[-1]
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # [N, 1, 3, 3, size, size]
    down, right = torch.randint(3, (2, len(images)), generator=generator)
    return windows[torch.arange(len(images)), :, down, right]


def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose highest score is their label."""
    with torch.no_grad():
        guesses = torch.cat([network.logits(batch.float()).argmax(1) for batch in images.split(500)])
    return (guesses == labels).float().mean().item()


def train(network: nn.Module, images: Tensor, labels: Tensor, epochs: int, batch_size: int = 64) -> None:
    """AdamW on a one-cycle learning rate; the order, the shifts and so the result are fixed by the seed 0."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    steps = epochs * (len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)[: len(images) // batch_size * batch_size]
        for batch in order.split(batch_size):
            x = shifted(images[batch], generator).float()
            loss = F.cross_entropy(network.logits(x), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def write(network: nn.Module, name: str, folder: Path) -> Path:
    """Save the weights under a name that holds their hash, in the place of an earlier file of that name."""
    content = safetensors.torch.save({key: value.contiguous() for key, value in network.state_dict().items()})
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:8]}.safetensors"
    for earlier in folder.glob(f"{name}-*.safetensors"):
        earlier.unlink()
    path.write_bytes(content)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, report and save."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "fashion_mnist"), required=True)
    parser.add_argument("--fashion-dir", help="folder of the four .gz files; /usr/share/datasets/fashion-mnist without")
    parser.add_argument("--out", type=Path, default=ROOT / "eval/weights", help="folder for the weights")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="what is printed")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        found = fitted(options.data, options.fashion_dir, options.out)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    except (ValueError, OSError) as error:
        return refuse(f"train_classifier.py: {str(error).replace('data.path', '--fashion-dir')}")
    return exits.DONE


def fitted(data: str, fashion_dir: str | None, out: Path) -> dict[str, str | float]:
    """Train the classifier of ``data`` into ``out``; what --json takes."""
    torch.manual_seed(0)
    if data == "digits":
        name, network, epochs = "digits-cnn", digits_cnn(), 40
    else:
        name, network, epochs = "fashion-mnist-cnn", fashion_mnist_cnn(), 3
    dataset = load(DataConfig(source=data, path=fashion_dir))
    train(network, *arrays(dataset.train), epochs=epochs)
    found: dict[str, str | float] = {"name": name}
    for part, source in (("training", dataset.train), ("heldout", dataset.heldout)):
        found[part] = float(accuracy(network, *arrays(source)))
        print(f"{name}: accuracy {found[part]:.4f} on {len(source)} {part} images")
    found["weights"] = str(write(network, name, out))
    print(f"wrote {found['weights']}")
    return found


if __name__ == "__main__":
    sys.exit(main())
