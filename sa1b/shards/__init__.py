"""What lies on disk: sources as downloaded, and the shards, records and indexes made from them.

From a source to shards: source, archive, pairing, annotation, jpeg, record, shard, index, manifest.
"""
