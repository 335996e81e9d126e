"""Ask the server of this machine for its health: `python -m funitel.launcher.health_check FILE`, for a container.

FILE is that of `--address-file`. It imports the standard library alone, since it runs several times a minute.
"""

import http.client
import json
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER_SECONDS = 5.0


def health(url: str, cert: str | None = None, key: str | None = None) -> tuple[bool, str]:
    """Whether `GET /health` of a server answers 200, and in words what it answered."""
    connection = _connection(url, cert, key)
    try:
        connection.request("GET", "/health", headers={"Host": "localhost"})  # which --allowed-host always allows
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return False, f"{url} does not answer: {error}"
    finally:
        connection.close()
    return status == 200, f"{url}/health answers {status}"


def _connection(url: str, cert: str | None, key: str | None) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port, timeout=ANSWER_SECONDS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # its certificate names other addresses than this one
    context.verify_mode = ssl.CERT_NONE
    if cert is not None:
        context.load_cert_chain(cert, key)
    return http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_SECONDS, context=context)


def main(arguments: list[str]) -> int:
    """Print one line; return 0 for a healthy server, 1 for any other, 2 for a wrong command line."""
    if len(arguments) != 1:
        print("error: give the file of --address-file", file=sys.stderr)
        return 2
    try:
        address: dict[str, Any] = json.loads(Path(arguments[0]).read_text())
        is_healthy, message = health(**address)
    except FileNotFoundError:
        is_healthy, message = False, f"no server serves: there is no {arguments[0]}"
    except (OSError, ValueError, TypeError) as error:
        is_healthy, message = False, f"{arguments[0]}: {error}"
    print(message)
    return 0 if is_healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
