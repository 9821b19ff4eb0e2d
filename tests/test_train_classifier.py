"""scripts/train_classifier.py on the digits, for one epoch."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import train_classifier

from eval.extractors.classifier import digits_cnn
from tests.docstrings import keys


def test_weights_are_named_by_their_hash_and_numbers_as_the_docstring_says(tmp_path, monkeypatch, capsys):
    whole = train_classifier.train
    monkeypatch.setattr(train_classifier, "train", lambda *given, epochs: whole(*given, epochs=1))
    (tmp_path / "digits-cnn-00000000.safetensors").touch()
    words = ["--data", "digits", "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert train_classifier.main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert found.keys() == keys(train_classifier.__doc__, "--json FILE takes")
    assert found["name"] == "digits-cnn" and 0.3 < found["heldout"] < 1
    assert f"{found['training']:.4f} on 1438 training images" in capsys.readouterr().out
    (weights,) = tmp_path.glob("*.safetensors")
    assert str(weights) == found["weights"]
    assert weights.stem == f"digits-cnn-{hashlib.sha256(weights.read_bytes()).hexdigest()[:8]}"
    digits_cnn().load_state_dict(load_file(weights))
