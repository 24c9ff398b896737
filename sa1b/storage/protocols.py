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


_LISTING = "A store that does not allow listing also returns this error for an object that does not exist"
_PLACES = {
    S3: "credentials are looked up in this order: the options key, secret, token, profile or anon; "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN); the profile AWS_PROFILE in "
    "~/.aws/credentials and ~/.aws/config; the container's or the machine's role. "
    f"AWS_ENDPOINT_URL names a store other than Amazon's. {_LISTING}",
    GCS: "credentials are looked up in this order: the option token; the file of "
    "GOOGLE_APPLICATION_CREDENTIALS; those of `gcloud auth application-default login`; the machine's service "
    f"account. {_LISTING}",
    AZURE: "credentials are looked up in this order: the options connection_string, account_name with "
    "account_key, sas_token or client_id; AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME "
    "with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CLIENT_ID; with an account "
    "name only, those of `az login` and the machine's identity",
    HUB: "a private or gated repository needs a token: the option token, HF_TOKEN, or `hf auth login`; a "
    "repository that does not exist gives the same error",
}


def advice(url: str) -> str:
    """How to give credentials for a URL."""
    protocol = protocol_of(url)
    found = (text for protocols, text in _PLACES.items() if protocol in protocols)
    return next(found, "check the permissions and the credentials in the URL or the storage options")
