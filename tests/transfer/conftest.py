from tests.datasets import bucket, dataset, place, root, sources

__all__ = ["bucket", "dataset", "place", "root", "sources"]
