"""Where each kind of store looks for credentials, for the messages of denied access."""

from sa1b.storage.protocols import AZURE, GCS, HUB, S3, protocol_of

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
