"""Places that hold objects: buckets (S3, GCS, a folder) and web servers, read without Python's lock (obstore)."""

import datetime
import os
import pathlib
import urllib.parse
from typing import TYPE_CHECKING

import obstore.store
from obstore.store import ObjectStore

from bridge.credentials import Tls, Token
from bridge.validation import is_loopback

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore.store import ClientConfig, RetryConfig

BUCKET_SCHEMES = ("s3", "gs", "file")
"""What can be written to; `http` and `https` are only read."""


def open_source(
    url: str,
    *,
    token: Token | None = None,
    tls: Tls | None = None,
    timeout_s: float = 60.0,
    max_retries: int | None = None,
    is_written: bool = False,
) -> ObjectStore:
    """Whatever lies under a URL; nothing is asked of it yet.

    Buckets take their credentials from the environment as their own tools do (AWS_*, GOOGLE_APPLICATION_CREDENTIALS);
    AWS_ENDPOINT_URL leads to another service that speaks S3, with AWS_ALLOW_HTTP=true also unencrypted.

    Args:
      url: s3://bucket/prefix, gs://bucket/prefix, file:///folder, https://host:port/prefix or http://.
      token: shown to web servers.
      tls: whose `ca` is trusted besides the system's.
      timeout_s: how long one request may take.
      max_retries: how often a request is made again by itself; None: obstore's own default, for minutes. A caller that
        tries again itself wants 0.
      is_written: makes the folder of a file:// URL; who only reads makes none.

    Raises:
      ValueError: another scheme, or http to another machine, which would show the token to everyone between.
      FileNotFoundError: the folder of a file:// URL is not there, and is not to be made.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        folder = pathlib.Path(urllib.parse.unquote(parts.path))
        if not is_written and not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        return obstore.store.from_url(url, mkdir=is_written)
    retry: RetryConfig | None = None if max_retries is None else {"max_retries": max_retries}
    timeout = datetime.timedelta(seconds=timeout_s)
    options: ClientConfig = {"timeout": timeout, "connect_timeout": datetime.timedelta(seconds=min(10.0, timeout_s))}
    if tls is not None and tls.ca is not None:
        options["root_certificate"] = tls.ca.read_bytes()
    if parts.scheme in ("http", "https"):
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(f"{url} is on another machine and not encrypted; serve snapshots by https")
        options["allow_http"], options["http1_only"] = parts.scheme == "http", True
        if token is not None:
            options["default_headers"] = {"Authorization": token.header}
        return obstore.store.HTTPStore.from_url(url, client_options=options, retry_config=retry)
    if parts.scheme in BUCKET_SCHEMES:
        # obstore does not read this one from the environment once it is given any option (an endpoint for a trial).
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            options["allow_http"] = True
        return obstore.store.from_url(url, client_options=options, retry_config=retry)
    raise ValueError(f"{url} must begin with s3://, gs://, file:///, https:// or (on loopback) http://")


def is_of_this_machine(url: str) -> bool:
    """Whether what lies under a URL comes from a folder or a server of this machine; a bucket's service does not."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "file" or (parts.scheme in ("http", "https") and is_loopback(parts.hostname or ""))
