"""Signatures of manifests and announcements: whoever holds the run's token can tell its own from anybody else's.

Data files need none: the manifest holds their hashes. A message says its type, so the signature of one is none of the
other.
"""

import dataclasses
from typing import TypeVar

from bridge import codec
from bridge.published import Announcement, WeightManifest
from bridge.secrets import TOKEN_FILE, Token
from bridge.snapshots.layout import SnapshotError

T = TypeVar("T", WeightManifest, Announcement)


def sign(signed: T, token: Token) -> T:
    """The same with the keyed hash of all the rest of it."""
    return dataclasses.replace(signed, hmac=token.sign(_message(signed)))


def check_signature(signed: WeightManifest | Announcement, token: Token) -> None:
    """Refuses what the token has not signed.

    Raises:
      SnapshotError: it is unsigned, or its signature is another's or another message's.
    """
    manifest = signed if isinstance(signed, WeightManifest) else signed.manifest
    what = "manifest" if signed is manifest else "announcement"
    if signed.hmac is None:
        raise SnapshotError(f"version {manifest.version} has an unsigned {what}, and this actor was given a token")
    if not token.has_signed(_message(signed), signed.hmac):
        raise SnapshotError(
            f"the {what} of version {manifest.version} was not signed with this actor's token; "
            f"learner and actors need the same one ({TOKEN_FILE})"
        )


def _message(signed: WeightManifest | Announcement) -> bytes:
    return codec.encode(dataclasses.replace(signed, hmac=None))
