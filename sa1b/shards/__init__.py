"""Files of a dataset directory: shards, records, indexes and manifests.

In reading order: annotation, jpeg, record, shard, index, sample_table, manifest, commit, dataset.
"""

# Limits of the size of an image. Without imports, because the help texts of commands show these numbers.
MAX_IMAGE_PIXELS = 1 << 24  # real files: 2250 x 1500; decoding a progressive JPEG takes 9 bytes a pixel
MAX_STORED_PIXELS = 1 << 28  # upper limit of --max-pixels; every reader accepts images of this size
