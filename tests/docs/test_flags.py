"""The search for flags in blocks that are not run."""

import pytest

from tests.docs.flags import check_flags, commands_of


def test_a_block_is_split_into_simple_commands() -> None:
    code = """\
sa1b view shards --masks-where "area_fraction < 0.9 and x > 2" \\
    --name train  # the part to train on; not & held out
NAME=x srun sa1b reshard downloads --task $SLURM_ARRAY_TASK_ID/8 > log.txt && echo done | cat
"""
    assert commands_of(code) == [
        ["sa1b", "view", "shards", "--masks-where", "area_fraction < 0.9 and x > 2", "--name", "train"],
        ["NAME=x", "srun", "sa1b", "reshard", "downloads", "--task", "1/8"],
        ["echo", "done"],
        ["cat"],
    ]


def test_flags_that_exist_are_accepted_and_nothing_is_run() -> None:
    check_flags("torchrun --nproc_per_node=8 -m sa1b.train --preset vit_b --data.root s3://bucket/shards")
    check_flags("cd sa1b && sa1b verify s3://bucket/shards --deep; sa1b --help")


def test_a_flag_of_a_verb_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(SystemExit):
        check_flags("sa1b verify shards --dep")
