"""Google Cloud Storage on one machine, for tests: Google's own test server, on a free port of 127.0.0.1.

It obeys preconditions (`ifGenerationMatch`), lists, reads ranges and takes resumable uploads as the service
does, and keeps everything in memory. It does not check credentials.
"""

import os
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.storage.ceph import free_port, wait_for

INSTALL = "pipx install git+https://github.com/googleapis/storage-testbench"
PROGRAM = "storage-testbench"

# gcsfs ends the headers of the parts of a body by LF, and sends the chunks of an upload by POST. The service
# accepts both; the test server needs CRLF and PUT. The bucket `denied` answers as without permissions.
_SERVER = """
import io, sys
from werkzeug import serving
import testbench

def converted(environ, start_response):
    query, path = environ["QUERY_STRING"], environ["PATH_INFO"]
    if "/b/denied" in path:
        start_response("403 Forbidden", [("Content-Type", "application/json")])
        return [b'{"error": {"code": 403, "message": "tests does not have storage.objects.create access"}}']
    if "uploadType=multipart" in query:
        *heads, rest = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).split(b"\\n\\n", 2)
        end = b"\\n--==0==--"
        data = b"\\n\\n".join([*heads, b""]).replace(b"\\n", b"\\r\\n") + rest.removesuffix(end) + b"\\r" + end
        environ |= {"wsgi.input": io.BytesIO(data), "CONTENT_LENGTH": str(len(data))}
    if "upload_id=" in query and environ["REQUEST_METHOD"] == "POST":
        environ["REQUEST_METHOD"] = "PUT"
    return server(environ, start_response)

server = testbench.run()
serving.run_simple("127.0.0.1", int(sys.argv[1]), converted, threaded=True)
"""


def missing() -> bool:
    """Whether the program is not installed."""
    return shutil.which(PROGRAM) is None


class Server:
    """A running store; use as a context."""

    protocol = "gs"
    denied = "gs://denied/shards"

    def __init__(self) -> None:
        program = shutil.which(PROGRAM)
        assert program is not None
        python = Path(program).read_text().splitlines()[0].removeprefix("#!")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", python, "-c", _SERVER, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        )
        try:
            wait_for(self._answers, "the server")
        except BaseException:
            self.stop()
            raise

    @property
    def options(self) -> dict[str, Any]:
        """For a file system of fsspec."""
        return {"token": "anon", "endpoint_url": self.url, "project": "tests"}

    @property
    def environment(self) -> dict[str, str]:
        """For a command without options."""
        return {"STORAGE_EMULATOR_HOST": self.url, "GOOGLE_CLOUD_PROJECT": "tests"}

    def new_bucket(self) -> str:
        name = secrets.token_hex(8)
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b?project=tests",
            b'{"name": "%s"}' % name.encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
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
            with urllib.request.urlopen(f"{self.url}/storage/v1/b?project=tests", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
