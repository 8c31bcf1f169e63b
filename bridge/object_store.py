"""Object stores for snapshots and groups: buckets (S3, GCS, a folder) and web servers, through obstore.

obstore reads and writes without Python's global lock.
"""

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
"""URL schemes that can be written to; `http` and `https` are read-only."""


def open_source(
    url: str,
    *,
    token: Token | None = None,
    tls: Tls | None = None,
    timeout_s: float = 60.0,
    max_retries: int | None = None,
    is_written: bool = False,
) -> ObjectStore:
    """Returns the object store at a URL without sending a request.

    Buckets read their credentials from the environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS). AWS_ENDPOINT_URL
    selects another S3-compatible service. AWS_ALLOW_HTTP=true allows it to be unencrypted.

    Raises ValueError if the scheme is not supported, or is http to another machine, which would expose the token.
    Raises FileNotFoundError if the folder of a file:// URL does not exist and `is_written` is False.

    Args:
      url: s3://bucket/prefix, gs://bucket/prefix, file:///folder, https://host:port/prefix or http://.
      token: sent to web servers.
      tls: its `ca` is trusted in addition to the system's.
      max_retries: retries of one request inside obstore. None uses obstore's default, which lasts minutes. Callers with
        their own retries pass 0.
      is_written: True creates the folder of a file:// URL.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        folder = pathlib.Path(urllib.parse.unquote(parts.path))
        if not is_written and not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        return obstore.store.from_url(url, mkdir=is_written)
    retry: RetryConfig | None = None if max_retries is None else {"max_retries": max_retries}
    timeout = datetime.timedelta(seconds=timeout_s)
    options: ClientConfig = {"timeout": timeout, "connect_timeout": datetime.timedelta(seconds=min(10.0, timeout_s))}
    if tls is not None and tls.ca is not None:
        options["root_certificate"] = tls.ca.read_bytes()
    if parts.scheme in ("http", "https"):
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(f"{url}: http is allowed only on loopback; serve snapshots by https")
        options["allow_http"], options["http1_only"] = parts.scheme == "http", True
        if token is not None:
            options["default_headers"] = {"Authorization": token.header}
        return obstore.store.HTTPStore.from_url(url, client_options=options, retry_config=retry)
    if parts.scheme in BUCKET_SCHEMES:
        # obstore ignores this variable once it is given any client option (needed for a local test endpoint).
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            options["allow_http"] = True
        return obstore.store.from_url(url, client_options=options, retry_config=retry)
    raise ValueError(f"{url} must begin with s3://, gs://, file:///, https:// or (on loopback) http://")


def is_of_this_machine(url: str) -> bool:
    """Returns True if a URL is a folder or a loopback server; False for buckets."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "file" or (parts.scheme in ("http", "https") and is_loopback(parts.hostname or ""))
