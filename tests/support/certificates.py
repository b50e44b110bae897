"""Certificates that hosts of a test show each other."""

import subprocess
from pathlib import Path

from dtft.checkpoint.transport.protocol import Tls


def certificate(folder: Path, name: str) -> Tls:
    """A certificate that signs itself."""
    made = Tls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"]
    command += ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return made
