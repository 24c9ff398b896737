"""Importing this module loads what reading the flags of the training command loads: 0.1 s of each start."""

from sa1b.engine import config
from sa1b.recipes.presets import PRESETS
from tests.engine import reconstruction

for _presets in (PRESETS, reconstruction.PRESETS):
    _preset = next(name for name in _presets if name in ("tiny", "small"))
    config.parse(["--preset", _preset, "--data.root", "root", "--out", "run"], None, _presets)
