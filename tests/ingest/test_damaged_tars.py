"""A part of the damaged tars of damaged_tars.py: every sample is exact, or listed, or in reported damage."""

import pytest

from tests.ingest.damaged_tars import KINDS, check

TARS_PER_KIND = 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_of_a_damaged_tar_is_accounted_for(kind, tmp_path):
    for seed in range(TARS_PER_KIND):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(kind, 1_000_000 + seed, folder)
