"""The requests of the Hugging Face Hub that reading a dataset repository needs, for the files of a folder."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/name"
_INFO = re.compile(rf"/api/datasets/{REPOSITORY}(/revision/main)?")
_TREE = re.compile(rf"/api/datasets/{REPOSITORY}/tree/main/?(.*)")
_FILE = re.compile(rf"/datasets/{REPOSITORY}/resolve/main/(.*)")


class Hub:
    """A running server; use as a context.

    Attributes:
        ranges: lengths of the ranges that were read.
    """

    def __init__(self, folder: Path) -> None:
        self.ranges: list[int] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                if _INFO.fullmatch(path):
                    self.send(200, json.dumps({"id": REPOSITORY, "sha": "0" * 40, "tags": []}).encode())
                elif (tree := _TREE.fullmatch(path)) and (folder / tree[1]).is_dir():
                    self.send(200, json.dumps([entry(one) for one in (folder / tree[1]).iterdir()]).encode())
                elif (file := _FILE.fullmatch(path)) and (folder / file[1]).is_file():
                    data = (folder / file[1]).read_bytes()
                    if self.headers["range"] is None:
                        self.send(200, data)
                        return
                    start, end = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
                    hub.ranges.append(end + 1 - start)
                    self.send(206, data[start : end + 1])
                elif _TREE.fullmatch(path) or _FILE.fullmatch(path):
                    self.send(404, b"{}", "EntryNotFound")
                else:
                    self.send(401, b"{}", "RepoNotFound")

            def send(self, status: int, data: bytes, code: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
                if code:
                    self.send_header("X-Error-Code", code)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        def entry(path: Path) -> dict[str, object]:
            kind = "directory" if path.is_dir() else "file"
            name = path.relative_to(folder).as_posix()
            return {"type": kind, "path": name, "oid": "0" * 40, "size": path.stat().st_size}

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
