"""A certificate for loopback and two of AWS' hosts, signed by itself, made by the `openssl` command."""

import ssl
import subprocess
from pathlib import Path

_EXTENSIONS = (
    "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:s3.us-east-1.amazonaws.com,DNS:s3.eu-west-1.amazonaws.com",
    "keyUsage=critical,digitalSignature,keyCertSign",
    "basicConstraints=critical,CA:TRUE",
)


def make_certificate(directory: Path) -> tuple[Path, ssl.SSLContext]:
    """Write key and certificate into `directory` unless they are there; return certificate and context.

    Raises CalledProcessError or FileNotFoundError if `openssl` fails or is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    if not certificate.exists():
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        command += [
            "-nodes",
            "-days",
            "30",
            "-subj",
            "/CN=s3server",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ]
        for extension in _EXTENSIONS:
            command += ["-addext", extension]
        subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
