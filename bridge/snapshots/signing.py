"""A manifest's signature: whoever holds the run's token can tell its snapshots from anybody else's.

Data files need none: the manifest holds their hashes.
"""

import dataclasses

from bridge import codec
from bridge.secrets import Token
from bridge.snapshots.layout import SnapshotError
from bridge.types import WeightManifest


def sign(manifest: WeightManifest, token: Token) -> WeightManifest:
    """The manifest with the keyed hash of all the rest of it."""
    return dataclasses.replace(manifest, hmac=token.sign(_message(manifest)))


def check_signature(manifest: WeightManifest, token: Token) -> None:
    """Refuses a manifest that the token has not signed.

    Raises:
      SnapshotError: it is unsigned, or its signature is another's or another manifest's.
    """
    if manifest.hmac is None:
        raise SnapshotError(f"version {manifest.version} has an unsigned manifest, and this actor was given a token")
    if not token.has_signed(_message(manifest), manifest.hmac):
        raise SnapshotError(
            f"version {manifest.version} has a manifest that was not signed with this actor's token; "
            "learner and actors need the same one"
        )


def _message(manifest: WeightManifest) -> bytes:
    return codec.encode(dataclasses.replace(manifest, hmac=None))
