"""Damage to dataset.json."""

import pytest

from sa1b import Dataset
from sa1b.errors import ManifestError
from tests.verify.checking import edit_json


@pytest.mark.parametrize(
    ("part", "key", "message"),
    [
        ("options", "image_size", "damaged: options has no image_size"),
        ("totals", "doubtful", r"damaged: .*doubtful"),
    ],
)
def test_what_dataset_json_lacks_is_damage(root, part, key, message):
    edit_json(root / "dataset.json", lambda document: document[part].pop(key))
    with pytest.raises(ManifestError, match=message):
        Dataset(root)
