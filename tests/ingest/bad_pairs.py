"""One thing wrong with one pair among twelve good ones: how to write it, and what ingest made of it."""

import json

from tests.shards import tiny
from tests.shards.tiny import SIZE, document, encode, pair

GOOD = range(100, 112)
BAD = 500  # the image that something is wrong with
HEIGHT, WIDTH = SIZE
ALL = HEIGHT * WIDTH
JPEG = pair(BAD)[0]


class Outcome:
    """What ingest made of a source: the task, the samples, and what quarantine lists."""

    def __init__(self, root, task):
        self.root, self.task = root, task
        self.samples = tiny.read_back(root)
        self.refused = tiny.lines(root, task.name)
        self.warnings = tiny.lines(root, task.name, "warnings.jsonl")

    def check(self, members, ids=GOOD):
        """The good pairs are exact, the sums agree, what is refused lies in quarantine byte for byte."""
        for image_id in ids:
            jpeg, text = pair(image_id)
            assert self.samples[image_id] == (jpeg, json.loads(text))
        counts = self.task.counts
        assert counts["members"] == 2 * counts["images"] + counts["refused_members"]
        assert counts["images"] == len(self.samples)
        lines = [line for line in self.refused if line["name"] is not None]
        assert counts["refused_members"] == len(lines)
        contents = set(members)
        for line in lines:
            data = tiny.quarantined(self.root, self.task.name, line)
            assert (line["name"], data) in contents
            assert line["bytes"] == len(data)
        return self


def typed(value):
    """A value that equals another only if types, key order and the bits of floats do."""
    if isinstance(value, dict):
        return dict, [(key, typed(item)) for key, item in value.items()]
    if isinstance(value, list):
        return list, [typed(item) for item in value]
    return type(value), value.hex() if isinstance(value, float) else value


def changed(**image):
    """The bad image's annotation file with other values in `image`."""
    found = document(BAD)
    found["image"] |= image
    return encode(found)


def mask_changed(number=1, image_id=BAD, **values):
    """The bad image's annotation file with other values in one mask."""
    found = document(image_id)
    found["annotations"][number] |= values
    return encode(found)


def with_counts(counts, size=SIZE):
    return mask_changed(segmentation={"size": list(size), "counts": counts})
