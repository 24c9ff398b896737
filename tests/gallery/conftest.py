from tests.datasets import bucket, dataset, root, sources

__all__ = ["bucket", "dataset", "root", "sources"]
