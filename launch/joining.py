"""What an actor needs to serve a run: from the run's folder, or from its store where it shares no folder with it."""

import contextlib
import dataclasses
import json
import pathlib
import re
import time
import urllib.parse
from collections.abc import Collection, Mapping

from absl import logging

from actor.weights.local_copy import LocalCopy
from actor.weights.model_folder import ModelFolder, read_model_folder
from actor.weights.run_card import check_versions, installed_vllm, make_model_folder
from actor.weights.source import LocalSource, RemoteSource, WeightSource
from bridge.buckets import is_loopback
from bridge.published import RunCard
from bridge.run_lock import RunLock
from bridge.secrets import TOKEN_FILE, Token, read_tls, read_token
from bridge.snapshots.fetch import SnapshotFetcher
from bridge.snapshots.layout import SnapshotError
from bridge.snapshots.shared import SharedCopy
from bridge.store.open import NoRunError, find_run, open_store, sqlite_path
from bridge.store.protocol import ActorStore
from bridge.store.sql.store import SqlStore
from configs import extension, overrides
from configs.run_folder import RunFolder, is_remote_store, run_id, snapshot_folder, store_url
from configs.schema import Config
from launch import command_line
from launch.cache import cache_folder

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FOLDER_POLL_S, _CARD_POLL_S = 0.1, 1.0
FRESH_S, BEATS_S = 10.0, 6.0
"""A sign of life younger than that may be a living process's; it lives if there is another one within so long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
    """A run, as an actor finds it."""

    config: Config
    run: str
    """Its id."""
    name: str
    """This actor's."""
    model: ModelFolder
    store: ActorStore
    work: RunFolder
    """Where the actor keeps its events and limits: the run's folder, or one of its own."""
    source: WeightSource
    """Where its weights come from."""
    parts: contextlib.ExitStack
    """What is let go at the end."""

    @property
    def own_verifiers(self) -> Collection[str]:
        """The user's own functions that may be imported to judge responses."""
        name = self.config.prompts.verifier
        return (name,) if extension.is_own(name) else ()


def join_folder(run_dir: str, name: str, *, wait_s: float) -> Joined:
    """A run on this machine, by its folder, as soon as it is set up, and in its store.

    Raises:
      ValueError: it was not in time, or can't be used.
    """
    folder = pathlib.Path(run_dir)
    deadline = time.monotonic() + wait_s
    while not RunFolder(folder).model_path_file.is_file() and time.monotonic() < deadline:
        time.sleep(_FOLDER_POLL_S)
    prepared = command_line.open_prepared(run_dir)
    config, id_ = prepared.config, run_id(folder)
    model = read_model_folder(prepared.model_folder, dtype=config.model.served_dtype)
    with contextlib.ExitStack() as parts:
        copy = LocalCopy(snapshot_folder(config), name)
        parts.callback(copy.close)
        source = LocalSource(
            snapshot_folder(config),
            copy.file,
            run=id_,
            tokenizer_hash=model.tokenizer_hash,
            expected=model.tensors,
        )
        parts.callback(source.close)
        if is_remote_store(config):  # a file is made by whoever comes first; a run in a database by its learner
            _wait_for_run(store_url(config), id_, deadline)
        store = _open(store_url(config), id_, config)
        parts.callback(store.close)
        return Joined(
            config=config,
            run=id_,
            name=name,
            model=model,
            store=store,
            work=RunFolder(folder),
            source=source,
            parts=parts.pop_all(),
        )


def join_store(
    url: str,
    run: str,
    name: str,
    *,
    given: Mapping[str, str],
    allowed_modules: Collection[str],
    work_dir: str | None,
    memory: str,
    wait_s: float,
) -> Joined:
    """A run anywhere, by its store: its card has all but the weights.

    Args:
      url: where the store is.
      run: the run's name in it.
      name: the actor's.
      given: --config.actor.* of this machine.
      allowed_modules: `module:function` names that the run's config may make this machine import.
      work_dir: a folder for this actor's events and limits; None: one in the cache folder.
      memory: a folder in shared memory for weights.
      wait_s: how long to wait for the run to appear.

    Raises:
      ValueError: another version, a name that a live actor has, code that is not allowed, an override that is not this
        actor's, weights that nobody vouches for; one line says what to do.
      TimeoutError: the store can't be reached, or there is no such run in time.
    """
    check_names(run=run, name=name)
    check_given(given)
    token, tls = read_token(), read_tls()
    check_trust(url, token)
    deadline = time.monotonic() + wait_s
    id_ = _wait_for_run(url, run, deadline)
    check_id(id_, run)
    with contextlib.ExitStack() as parts, contextlib.closing(open_store(url, run=id_, retry_s=wait_s)) as first:
        card = _wait_for_card(first, run, deadline)
        check_id(card.run, run)
        check_versions(card, vllm=installed_vllm())
        config = config_of(card, given, allowed_modules)
        work = RunFolder(pathlib.Path(work_dir) if work_dir else cache_folder() / "actors" / f"{id_}-{name}")
        work.path.mkdir(parents=True, exist_ok=True)
        parts.callback(_lock(work, name).release)
        check_name_is_free(first, name)
        model = make_model_folder(card, first.blob, cache_folder() / "models")
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(work.path)))
        fetcher = SnapshotFetcher(
            run=card.run, tokenizer_hash=model.tokenizer_hash, expected=model.tensors, token=token, tls=tls
        )
        check_announced(first, fetcher)
        shared = SharedCopy(pathlib.Path(memory), run=card.run, fetcher=fetcher)
        parts.callback(shared.close)
        store = _open(url, id_, config)
        parts.callback(store.close)
        return Joined(
            config=config,
            run=card.run,
            name=name,
            model=model,
            store=store,
            work=work,
            source=RemoteSource(store, shared),
            parts=parts.pop_all(),
        )


def _open(url: str, run: str, config: Config) -> SqlStore:
    return open_store(
        url,
        run=run,
        busy_timeout_s=config.supervision.lock_wait_s,
        retry_s=config.store.retry_s,
        bucket=config.store.bucket,
        inline_bytes=config.store.inline_bytes,
    )


def check_trust(url: str, token: Token | None) -> None:
    """Refuses to serve a run elsewhere whose weights nobody vouches for, and a password that everyone may read.

    Raises:
      ValueError: says what to set.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.password is not None:
        raise ValueError("--store holds a password, and every user of this machine sees it; use PGPASSFILE, PGPASSWORD")
    if sqlite_path(url) is None and parts.hostname and not is_loopback(parts.hostname) and token is None:
        raise ValueError(
            f"a run of another machine needs its token, by which its weights are known: set {TOKEN_FILE} to a file "
            "with it"
        )


def check_announced(store: ActorStore, fetcher: SnapshotFetcher) -> None:
    """Looks at what is announced before an engine is started for it; nothing may be yet.

    Raises:
      ValueError: it could never be served here: another token, or none for what is on other machines, another
        tokenizer or model, or no way to it.
    """
    announcement = store.announced()
    if announcement is None:
        return
    if not announcement.sources:
        raise ValueError(
            "the run's weights are in its learner's memory alone: start the learner with publish.serve=https or "
            "publish.bucket, or this actor on its machine with --run_dir"
        )
    try:
        fetcher.check(announcement)
    except SnapshotError as e:
        raise ValueError(f"what the run announces can't be served here: {e}") from e


def check_names(*, run: str, name: str) -> None:
    """Refuses what is no name: it becomes a file's, and a group says by it who made it.

    Raises:
      ValueError: says which.
    """
    for flag, value in (("run", run), ("name", name)):
        if not _NAME.fullmatch(value):
            raise ValueError(f"--{flag} must be letters, digits, '_', '.' and '-', got {value!r}")


def check_id(id_: str, run: str) -> None:
    """Refuses an id that the store gives a run and that leads out of the folders named by it.

    Raises:
      ValueError: says which.
    """
    if not _NAME.fullmatch(id_):
        raise ValueError(f"the store gives run {run} the id {id_!r}, which no learner makes: is it the right store?")


def check_given(given: Mapping[str, str]) -> None:
    """Refuses overrides that would make another run of it.

    Raises:
      ValueError: names the field.
    """
    for path in given:
        if not path.startswith("actor."):
            raise ValueError(f"--config.{path} is the run's, not this actor's: only --config.actor.* may be given here")


def config_of(card: RunCard, given: Mapping[str, str], allowed_modules: Collection[str]) -> Config:
    """The run's config with this machine's overrides.

    Raises:
      ValueError: it is of another build, an override can't be, or it names code that this machine may not import.
    """
    try:
        raw = json.loads(card.config)
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        config = overrides.from_dict(raw)
    except RecursionError:
        raise ValueError(f"the config of run {card.name} can't be read here: it is nested too deeply") from None
    except (ValueError, TypeError) as e:
        raise ValueError(f"the config of run {card.name} can't be read here: {e}") from e
    # A folder of the learner's machine is none here.
    config = dataclasses.replace(config, publish=dataclasses.replace(config.publish, snapshot_dir=""))
    name = config.prompts.verifier
    if extension.is_own(name) and name not in allowed_modules:
        raise ValueError(
            f"run {card.name} has prompts.verifier={name}, code that is not Sluice's: look at it, and give "
            f"--allow_module={name} if this machine may import it"
        )
    return overrides.apply(config, given)


def check_name_is_free(store: ActorStore, name: str) -> None:
    """Looks whether a live actor elsewhere has this name: by a further sign of life from it, if its last is fresh.

    Raises:
      ValueError: one has.
    """
    last_s = _last_beat_s(store, name)
    if last_s is None or store.now_s() - last_s > FRESH_S:
        return
    logging.info("an actor of this name was alive %.0f s ago; looking whether it still is", store.now_s() - last_s)
    deadline = time.monotonic() + BEATS_S
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(_CARD_POLL_S, left_s))
        if _last_beat_s(store, name) != last_s:
            raise ValueError(f"a live actor of this run has the name {name}; give another --name")


def _last_beat_s(store: ActorStore, name: str) -> float | None:
    return next((b.time_s for b in store.heartbeats() if b.process == name), None)


def _lock(work: RunFolder, name: str) -> RunLock:
    try:
        return RunLock(work.path / "actor.lock", "actor")
    except ValueError as e:
        raise ValueError(f"a live actor {name} has {work.path}; give another --name, or --work_dir") from e


def _wait_for_run(url: str, run: str, deadline_s: float) -> str:
    """The run's id, as soon as its learner has made it."""
    while True:
        try:
            return find_run(url, run, retry_s=max(1.0, deadline_s - time.monotonic()))
        except NoRunError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_CARD_POLL_S)


def _wait_for_card(store: ActorStore, run: str, deadline_s: float) -> RunCard:
    while (card := store.card()) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the learner of run {run} has not said what the run is: is it running?")
        time.sleep(_CARD_POLL_S)
    return card
