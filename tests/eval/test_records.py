"""Which records may stand in one table."""

import pytest

from eval.records import Incomparable, check, check_alike, notes, table

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


RECORD = {"metric": "FID-8", "value": 3.0, "n_gen": 8, "n_ref": None, "kid": 0.1, "kid_standard_error": 0.01}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        *[({key: bad}, f"{key} is") for key in ("value", "kid", "floor_kid") for bad in (None, "1", [1], float("nan"))],
        ({"value": 10**400}, "value is 1000"),
        ({"metric": None}, "metric is None"),
        ({"n_gen": "8"}, "n_gen is '8'"),
        ({"n_ref": 8.5}, "n_ref is 8.5"),
        ({"value_low": 1.0}, "value_high is None"),
    ],
)
def test_records_that_were_cut_or_hold_no_numbers_are_refused(wrong, reason):
    check(RECORD)
    check(RECORD | {"floor": 1, "floor_kid": 0.0, "value_low": 1.0, "value_high": 2.0})
    with pytest.raises(ValueError, match=f"no record of a score: {reason}"):
        check(RECORD | wrong)
    for cut in (None, [], {"metric": "FID-8"}):
        with pytest.raises(ValueError, match="no record of a score"):
            check(cut)


def test_what_was_asked_for_is_told_and_not_only_kept():
    asked = {"details_count": 8, "value_low": 1.0, "value_high": 2.0, "bias": 0.5, "infinity": 1.2}
    asked |= {"infinity_standard_error": 0.1, "share_near": 0.25, "auth_pct": 40.0}
    rows = [{"name": str(i), "kid": i / 1e3, "kid_standard_error": 1e-3, "n_gen": 4, "n_ref": 5} for i in range(7)]
    said = notes(RECORD | asked | {"classes": [*rows, {"name": "none", "kid": None}]})
    assert notes(RECORD) == [] and all(line.startswith("of 8 images: ") for line in said[:4])
    for number in ("1.00 to 2.00", "is 0.50", "1.20 ± 0.10", "25.0 %", "40 %"):
        assert sum(number in line for line in said) == 1
    assert [line.split(":")[0] for line in said[4:]] == [f"class {i}" for i in (6, 5, 4, 3, 2)]
    assert said[4] == "class 6: KID·10³ 6.00 ± 1.00, 4 images against 5"
