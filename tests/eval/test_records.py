"""Which records may stand in one table."""

import pytest

from eval.records import Incomparable, check_alike, table

MUST_AGREE = (
    "metric protocol n_gen n_ref n_kept extractor weights_sha256 resize quantize image_shape reference_sha256 labels "
    "classes_sha256 weights sampler guidance sample_seed compute_dtype"
).split()


@pytest.mark.parametrize("key", MUST_AGREE)
def test_each_field_must_agree(key):
    check_alike({"a": {key: 1}, "b": {key: 1}})
    with pytest.raises(Incomparable, match=f"a has {key} 1 but b has 2"):
        check_alike({"a": {key: 1}, "b": {key: 2}})
    with pytest.raises(Incomparable, match=f"a has {key} 1 but b has None"):
        check_alike({"a": {key: 1}, "b": {}})


def test_a_table_without_a_floor_says_so():
    record = {"metric": "FID-8", "value": 3.0, "n_gen": 8, "n_ref": None}
    assert "floor: not measured" in table({"a": record})
    assert "| floor: other real images | 1.00 |" in table({"a": record | {"floor": 1.0, "floor_kid": 0.0}})
