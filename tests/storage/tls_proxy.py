"""A proxy that ends TLS in front of a plain server, and a certificate for it that is made on the spot.

`python -m tests.storage.tls_proxy PORT CERTIFICATE KEY` listens on a free port of 127.0.0.1, writes it, and
forwards to PORT. It ends with its standard input.
"""

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
from pathlib import Path

_CHUNK = 1 << 18


_CA = """
[ca]
default_ca = own
[own]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = of_server
[names]
commonName = supplied
[of_server]
subjectAltName = IP:127.0.0.1
"""


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, valid at any time, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    settings, request = folder / "ca.cnf", folder / "request.pem"
    settings.write_text(_CA.format(folder=folder))
    (folder / "index.txt").touch()
    ask = ["req", "-new", "-nodes", "-subj", "/CN=127.0.0.1", "-newkey", "rsa:2048"]
    sign = ["ca", "-selfsign", "-batch", "-notext", "-config", str(settings), "-keyfile", str(key)]
    valid = ["-startdate", "20000101000000Z", "-enddate", "20991231000000Z"]
    for command in (
        [*ask, "-keyout", str(key), "-out", str(request)],
        [*sign, *valid, "-in", str(request), "-out", str(certificate)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return certificate, key


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main() -> None:
    upstream, certificate, key = sys.argv[1:]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", int(upstream), limit=_CHUNK)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context, limit=_CHUNK)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
