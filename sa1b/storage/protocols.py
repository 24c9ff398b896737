"""The schemes of URLs by kind of store, and the options in which their file systems differ."""

from typing import Any

from sa1b.errors import UsageError

S3 = ("s3", "s3a")
GCS = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss", "adl")
HUB = ("hf",)
HTTP = ("http", "https")
READ_ONLY = (*HTTP, *HUB)  # writes to the Hugging Face Hub are commits, and have no conditions
EXTRAS = {GCS: "gcs", AZURE: "azure"}  # extras of this package with the file systems


def protocol_of(root: str) -> str:
    """The scheme of a URL; "" for a path, which may have the name of a scheme."""
    scheme, separator, _ = root.partition("://")
    return scheme if separator else ""


def endpoint_options(url: str, endpoint: str | None) -> dict[str, Any]:
    """The options of fsspec's file system for another server than the default one of a URL.

    Args:
        url: URL of a dataset directory or source; http(s) URLs name their server.
        endpoint: URL of the server; None: the default one.

    Raises:
        UsageError: the file system cannot be given an endpoint in this way.
    """
    protocol = protocol_of(url)
    if endpoint is None or protocol in HTTP:
        return {}
    if protocol in (*S3, *GCS):
        return {"endpoint_url": endpoint}
    if protocol in HUB:
        return {"endpoint": endpoint}
    way = "set AZURE_STORAGE_CONNECTION_STRING with BlobEndpoint instead" if protocol in AZURE else "omit it"
    raise UsageError(f"--endpoint {endpoint}: only for s3://, gs:// and hf://, not for {url}; {way}")
