"""Requests to a judge's endpoint, and what they fail with."""

import datetime
import email.utils
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from actor.rewards.verifiers.judge_answer import JudgeParseError

MAX_BODY_BYTES = 4 * 2**20
"""The largest reply that is read, in bytes."""


RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""And 5xx. The other 4xx say that the request, or the key, is wrong: it will be at each attempt."""


_MAX_SAID_CHARS = 200


class JudgeAwayError(RuntimeError):
    """The endpoint did not answer, or can't just now: worth another attempt."""

    def __init__(self, kind: str, said: str, *, retry_after_s: float = 0.0) -> None:
        """`retry_after_s` is how long it asked to be left alone."""
        super().__init__(said)
        self.kind = kind
        self.retry_after_s = retry_after_s


class JudgeUnreachedError(JudgeAwayError):
    """No connection was made: nobody is there, as while a judge is started again."""


class JudgeRefusedError(RuntimeError):
    """The endpoint refused the request, as it would refuse each other attempt."""

    def __init__(self, status: int, said: str) -> None:
        """`status` is HTTP's."""
        super().__init__(f"status {status}: {said}")
        self.status = status
        self.said = said


class Endpoint:
    """An API, as one process asks it."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float, concurrency: int) -> None:
        """Connections are made when they are first needed, in the loop that is running then."""
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, body: Mapping[str, Any]) -> str:
        """The text that the model answers.

        Raises:
          JudgeUnreachedError: no connection was made.
          JudgeAwayError: a connection was lost, or the endpoint says that it can't now.
          RefusedError: it refuses the request.
          JudgeParseError: what it replies is no whole answer.
        """
        try:
            # A redirect would take the key and the response to somewhere else.
            async with self._open().post(self._url, json=body, allow_redirects=False) as reply:
                data = await _read(reply)
                if reply.status != 200:
                    raise _failure(reply.status, reply.headers, data)
        except TimeoutError as e:
            raise JudgeAwayError("timeout", f"no answer within {self._timeout_s:g} s") from e
        except aiohttp.ClientSSLError as e:  # somebody is there, and nobody that we may talk to
            raise JudgeAwayError("connection", f"{type(e).__name__}: {e}") from e
        except aiohttp.ClientConnectorError as e:
            raise JudgeUnreachedError("no_connection", f"no connection: {e}") from e
        except (aiohttp.ClientError, OSError) as e:
            raise JudgeAwayError("connection", f"{type(e).__name__}: {e}") from e
        return _text(data)

    async def close(self) -> None:
        """Closes its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._concurrency),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def retry_after_s(value: str | None, now: datetime.datetime) -> float:
    """The seconds that a Retry-After header asks for: a number, or a date; 0 where it is neither."""
    if not value:
        return 0.0
    if value.strip().isdecimal():
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=datetime.UTC)
    return max(0.0, (until - now).total_seconds())


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in reply.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise JudgeParseError("too_large", f"the reply has more than {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _failure(status: int, headers: Mapping[str, str], data: bytes) -> JudgeAwayError | JudgeRefusedError:
    said = data[: 4 * _MAX_SAID_CHARS].decode(errors="replace")
    said = " ".join(said.split())[:_MAX_SAID_CHARS]
    if status in RETRIED_STATUSES or status >= 500:
        wait_s = retry_after_s(headers.get("Retry-After"), datetime.datetime.now(datetime.UTC))
        return JudgeAwayError(f"status_{status}", f"status {status}: {said}", retry_after_s=wait_s)
    return JudgeRefusedError(status, said)


def _text(data: bytes) -> str:
    """The text of a chat completion's only choice."""
    try:
        choices: Sequence[Any] = json.loads(data)["choices"]
        content, finish = choices[0]["message"]["content"], choices[0].get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as e:
        raise JudgeParseError("no_completion", f"the reply is no chat completion: {data[:80]!r}") from e
    if finish == "length":
        raise JudgeParseError("cut_off", "the answer was cut off at judge.max_tokens")
    if not isinstance(content, str):
        raise JudgeParseError("no_text", f"the answer holds no text but {type(content).__name__}")
    return content
