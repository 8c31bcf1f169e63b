"""Makes trial certificates and a token: `python -m launch.tools.make_certificates --out=DIR --host=learner.example`.

Writes ca.pem (a new certificate authority), server.pem and server.key (a certificate for the given hosts, and its key)
and token (a shared secret). Prints the settings for the learner's and the actors' machines. Existing files are kept
unless --force is given. In production use certificates of your own authority (docs/multi_machine.md).
"""

import pathlib

from absl import flags

from launch import cli
from launch.tools.store_server import certificates

_OUT = flags.DEFINE_string("out", None, "Folder for the files, created if needed.")
_HOST = flags.DEFINE_multi_string("host", [], "Name or address that clients dial. May be given several times.")
_DAYS = flags.DEFINE_integer("days", 30, "Validity of the certificate, in days.")
_FORCE = flags.DEFINE_boolean("force", False, "Replace existing files, including the token.")
SHARED_FLAGS = ()
"""Shared flags that this command accepts."""


def main() -> int:
    """Makes the files and prints the settings."""
    with cli.usage_errors():
        if _OUT.value is None:
            raise ValueError("set --out=FOLDER")
        folder = pathlib.Path(_OUT.value)
        certificates.make(folder, _HOST.value, days=_DAYS.value, force=_FORCE.value)
    print(certificates.settings(folder))
    return 0


if __name__ == "__main__":
    cli.run(main)
