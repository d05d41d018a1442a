"""Whether the server at a port of this machine is ready: the health check of container images.

    python -m tcomp.serve.health 8000

ends with 0 if it is. Without TLS or with it, whatever the certificate is: it asks nobody else. A server that wants certificates of its
clients hangs up on it, once it has shown its own: it is taken for ready.
"""

from __future__ import annotations

import ssl
import sys
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection

_PATIENCE = 1.0  # seconds that an answer, without TLS or with it, may take


def is_ready(port: int) -> bool:
    """Whether `/v2/health/ready` says so."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)) as plain:
        try:
            return _says_so(plain)
        except (OSError, HTTPException):  # nobody is there, or speaks so
            pass
    with closing(HTTPSConnection("127.0.0.1", port, timeout=_PATIENCE, context=context)) as secure:
        try:
            secure.connect()
        except OSError:
            return False
        try:
            return _says_so(secure)
        except (ConnectionError, ssl.SSLError):
            return True
        except (OSError, HTTPException):
            return False


def _says_so(connection: HTTPConnection) -> bool:
    connection.request("GET", "/v2/health/ready")
    return connection.getresponse().status == 200


if __name__ == "__main__":
    sys.exit(not is_ready(int(sys.argv[1])))
