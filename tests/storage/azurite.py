"""Azure Blob Storage on one machine, for tests: Microsoft's emulator, on a free port of 127.0.0.1.

It checks signatures and obeys conditions as the service does, and keeps everything in memory.
"""

import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import Any

from tests.storage.ceph import free_port, wait_for

INSTALL = "npm install -g azurite"
PROGRAM = "azurite-blob"
ACCOUNT = "devstoreaccount1"
# The documented key of the emulator's only account.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
WRONG_KEY = "d3Jvbmc="


def missing() -> bool:
    """Whether the program is not installed."""
    return shutil.which(PROGRAM) is None


class Server:
    """A running store; use as a context."""

    protocol = "az"

    def __init__(self) -> None:
        program = shutil.which(PROGRAM)
        assert program is not None
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", program, "--blobHost", "127.0.0.1"),
                *("--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"),
                "--disableTelemetry",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        try:
            wait_for(self._answers, "the server")
        except BaseException:
            self.stop()
            raise

    def options_with(self, key: str) -> dict[str, Any]:
        parts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": ACCOUNT,
            "AccountKey": key,
            "BlobEndpoint": self.url,
        }
        return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}

    @property
    def options(self) -> dict[str, Any]:
        """For a file system of fsspec."""
        return self.options_with(KEY)

    @property
    def environment(self) -> dict[str, str]:
        """For a command without options."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self.options["connection_string"]}

    def new_bucket(self) -> str:
        from azure.storage.blob import BlobServiceClient

        name = secrets.token_hex(8)
        with BlobServiceClient.from_connection_string(self.options["connection_string"]) as client:
            client.create_container(name)
        return name

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
