"""Files of a dataset directory: shards, records, indexes and manifests.

In reading order: annotation, jpeg, record, shard, index, sample_table, manifest, commit, dataset.
"""
