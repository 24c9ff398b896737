"""Layers of a dataset directory, many shards, and workers on other machines."""

import shutil
from dataclasses import replace

from sa1b.shards import manifest
from sa1b.verify import verify
from sa1b.verify.recover import lost_sources
from sa1b.verify.report import VerifyReport
from sa1b.verify.root_check import RootCheck
from tests.shards.tiny_source import add_layer
from tests.verify.checking import check, check_here, flip, kinds


def test_a_worker_on_another_machine_reads_its_own_copy_of_the_sample_table(root, tmp_path):
    with RootCheck(root, VerifyReport(str(root), deep=False)) as state:
        expected = state.expected()[0]
        elsewhere = tmp_path / "scratch of another machine" / state.table_path.name
        given = (state.store, expected, state.remedy, elsewhere, False, lambda count: None)
        assert (
            verify._check(*given).document()
            == verify._check(*given[:3], state.table_path, *given[4:]).document()
        )


def test_shards_are_taken_by_the_number_of_their_part(root):
    """Part 10,000 comes after part 9,999 everywhere: the table counts shards in this order."""
    task = manifest.read_tasks(root)["sa_000002"]
    (info,) = task.shards
    names = [f"sa1b-000002-{part:04d}.tar" for part in range(10_001)]
    many = replace(task, shards=[replace(info, name=name) for name in names])
    manifest.write_task(root, many)
    (root / "dataset.json").unlink()
    expected = [one.info.name for one in RootCheck(root, VerifyReport(str(root), False)).expected()]
    assert expected[-len(names) :] == names
    for name in names[1:]:
        (root / name).touch()
    shutil.rmtree(root / "tasks")
    assert lost_sources(root, {}, None)["sa_000002"] == names
    assert "dataset_missing" in kinds(check_here(root))


def test_layers_are_part_of_the_check(root):
    """tests/verify/test_mutations.py changes any byte of one."""
    add_layer(root, images=4)
    add_layer(root, "round3")
    report = check(root, deep=True)
    assert (report.findings, report.layers, report.exit_code()) == ([], 2, 0)
    assert "layers    2" in report.table()
    (root / "layers/round3/layer.json").unlink()
    path = root / "layers/round2/masks.bin"
    flip(path, 100)
    report = check(root)
    assert report.notes == ["layer round3 is unfinished: the same command makes it again"]
    (finding,) = report.findings
    assert (finding.kind, finding.file) == ("layer_damaged", "layers/round2")
    assert "layers/round2/masks.bin: sha256" in finding.message
    assert f"layer add {root} PATH/TO/MASKS --name round2 --overwrite" in finding.remedy
    deep = check(root, deep=True).findings
    assert len(deep) == 2
    assert "record of image 100 at offset" in deep[1].message
    path.write_bytes(b"a user's")
    (root / "layers/round2/layer.json").write_text("{}")
    (finding,) = check(root).findings
    assert finding.remedy == f"move {root}/layers/round2 to another folder, and make the layer again"


def test_layers_are_not_checked_without_the_sample_table(root):
    add_layer(root)
    next(root.glob("samples-*")).unlink()
    report = check(root)
    assert report.unchecked.keys() == {"layers"}
    assert report.exit_code() == 1
