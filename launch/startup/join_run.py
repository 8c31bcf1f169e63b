"""Attachment of an actor to its run, by run folder or by store URL, with the checks of store trust."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Collection, Mapping

from absl import logging

from actor.background import heartbeat
from actor.weights.model_folder import (
    ModelFolder,
    check_versions,
    for_adapters,
    installed_vllm,
    make_model_folder,
    model_folder_of,
    read_model_folder,
    with_base,
)
from actor.weights.source import LocalCopy, LocalSource, RemoteSource, WeightSource
from bridge.credentials import TOKEN_FILE, Token, read_tls, read_token
from bridge.files import lock_owner
from bridge.liveness import report_phase
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.store.open import FinishedRunError, NoRunError, SqlStore, find_run, open_store, sqlite_path
from bridge.store.postgres.connections import libpq_target_of, parse
from bridge.store.sql.actor_side import ActorStore
from bridge.store.store_types import NAME_LEASE_S, NameTakenError
from bridge.store.url_login import secret_in
from bridge.weight_types import RunCard
from configs import overrides
from configs.run_folder import RunFolder, run_id, snapshot_folder, store_url
from configs.schema import Config
from configs.sections import PublishConfig
from launch.startup import prepare_run
from launch.startup.locked_folders import ActorWorkFolder, ModelFolderLock
from launch.startup.tiny_model import cache_folder


def check_trust(url: str, token: Token | None) -> None:
    """Raises ValueError if a remote run has no token to authenticate its weights, or the URL holds a password."""
    check_no_password(url)
    if token is None and sqlite_path(url) is None and not libpq_target_of(url).is_here:
        raise ValueError(
            f"{TOKEN_FILE}: a run on another machine needs its token to authenticate the weights; set "
            f"{TOKEN_FILE} to a file with the token"
        )


def allowing(config: Config) -> list[str]:
    """Returns the flags that let an actor import the custom code named in a config."""
    return [f"--allow_module={name}" for name in (*config.custom_verifiers, *config.custom_environments)]


def check_no_password(url: str) -> None:
    """Raises ValueError if a store URL on the command line holds a password, or is not a store URL."""
    if sqlite_path(url) is None and (secret_in(url) or not {"password", "sslpassword"}.isdisjoint(parse(url))):
        raise ValueError(
            "--store must not contain a password, which every user of this machine could see; use PGPASSFILE or "
            "PGPASSWORD"
        )


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FOLDER_POLL_S, _CARD_POLL_S = 0.1, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedRun:
    """A run that an actor has joined."""

    config: Config
    run: str
    """Run id."""
    model: ModelFolder
    store: ActorStore
    work: RunFolder
    """Folder for the actor's events and limits: the run's folder, or a private one."""
    source: WeightSource
    """Source of the run's weights."""
    parts: contextlib.ExitStack
    """Resources to release when the actor exits."""
    own: ActorWorkFolder | None = None
    """Lock on `work`; None if `work` is the run's folder."""

    def done(self) -> None:
        """Marks the actor as finished, so that closing `parts` also removes its private cache folder."""
        if self.own is not None:
            self.own.is_done = True


def join_folder(
    run_dir: str, name: str, *, wait_s: float, wait_forever: bool = False, on_wait: Callable[[], None]
) -> JoinedRun:
    """Joins a run of this machine by its folder, once the run is set up, in its store, and not finished.

    `on_wait` is called repeatedly while it waits, for at most `wait_s` unless `wait_forever`. Raises FinishedRunError
    if the run is finished, and ValueError if it is invalid or was not ready in time.
    """
    folder = pathlib.Path(run_dir)
    deadline = math.inf if wait_forever else time.monotonic() + wait_s
    if not RunFolder(folder).model_path_file.is_file():
        report_phase("waiting for the run to be set up")
    while not RunFolder(folder).model_path_file.is_file() and time.monotonic() < deadline:
        on_wait()
        time.sleep(_FOLDER_POLL_S)
    prepared = prepare_run.open_prepared(run_dir)
    config, id_ = prepared.config, run_id(folder)
    model = for_adapters(read_model_folder(prepared.model_folder, dtype=config.model.served_dtype), config)
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
        path = sqlite_path(store_url(config))
        # actors may create a SQLite store; only the learner creates a run in a database
        if path is None or path.is_file():
            _wait_for_run(store_url(config), id_, deadline, retry_s=wait_s, on_wait=on_wait)
        store = _open(store_url(config), id_, config)
        parts.callback(store.close)
        register_actor(store, name, location=lock_owner(folder))
        return JoinedRun(
            config=config,
            run=id_,
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
    wait_forever: bool = False,
    on_wait: Callable[[], None],
) -> JoinedRun:
    """Joins a run by its store, whose run descriptor contains everything but the weights.

    `given` holds the --config.actor.* overrides of this machine, `allowed_modules` the `module:function` names that the
    run's config may make it import. `work_dir` is for this actor's events and limits (None: a folder in the cache),
    `memory` the shared-memory folder for weights. `wait_s` is the timeout for the run to appear, or to be resumed if it
    is finished. `on_wait` and `wait_forever` are as in `join_folder`.

    Raises FinishedRunError if all runs of that name are finished, and TimeoutError if the store is unreachable or the
    run did not appear in time. Raises ValueError that names the fix if a version, name, override, token or bucket does
    not match, or custom code is not allowed.
    """
    check_names(run=run, name=name)
    check_given(given)
    token, tls = read_token(), read_tls()
    check_trust(url, token)
    deadline = math.inf if wait_forever else time.monotonic() + wait_s
    id_ = _wait_for_run(url, run, deadline, retry_s=wait_s, on_wait=on_wait)
    check_id(id_, run)
    with contextlib.ExitStack() as parts, contextlib.closing(open_store(url, run=id_, retry_s=wait_s)) as first:
        card = _wait_for_card(first, run, deadline, on_wait=on_wait)
        check_id(card.run, run)
        check_versions(card, vllm=installed_vllm())
        config = config_of(card, given, allowed_modules)
        cached = cache_folder() / "actors" / f"{id_}-{name}"
        own = ActorWorkFolder(pathlib.Path(work_dir) if work_dir else cached, name, is_ours=work_dir is None)
        work = RunFolder(own.path)
        parts.callback(own.close)
        models = cache_folder() / "models"
        parts.callback(ModelFolderLock(model_folder_of(card, models)).close)
        model = with_base(make_model_folder(card, first.blob, models), config)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(work.path)))
        fetcher = SnapshotFetcher(
            run=card.run, tokenizer_hash=model.tokenizer_hash, expected=model.tensors, token=token, tls=tls
        )
        check_announced(first, fetcher, config.publish)
        shared = SharedDownload(pathlib.Path(memory), run=card.run, fetcher=fetcher)
        parts.callback(shared.close)
        store = _open(url, card.run, config)
        parts.callback(store.close)
        store.check_bucket()
        register_actor(store, name, location=lock_owner(work.path))
        return JoinedRun(
            config=config,
            run=card.run,
            model=model,
            store=store,
            work=work,
            source=RemoteSource(store, shared),
            parts=parts.pop_all(),
            own=own,
        )


def _open(url: str, run: str, config: Config) -> SqlStore:
    return open_store(
        url,
        run=run,
        busy_timeout_s=config.supervision.lock_wait_s,
        retry_s=config.store.outage_timeout_s,
        bucket=config.store.bucket,
    )


def check_announced(store: ActorStore, fetcher: SnapshotFetcher, publish: PublishConfig) -> None:
    """Checks the announced weights, if any, before an engine is started for them.

    Not checked are weights of an earlier incarnation, which the restarted learner replaces, and weights without a
    source of a run that has one by its config. Raises ValueError if this actor could never serve them: the token,
    tokenizer or model differs, or no source is reachable.
    """
    announcement = store.announced()
    if announcement is None or announcement.manifest.version.incarnation < store.incarnation():
        return
    if not announcement.all_sources:
        if publish.leaves_the_machine:
            return
        raise ValueError(
            "the run's weights are only in its learner's memory; start the learner with publish.serve=https or "
            "publish.bucket, or this actor on its machine with --run_dir"
        )
    try:
        fetcher.check(announcement)
    except SnapshotError as e:
        raise ValueError(f"this actor cannot serve the announced weights: {e}") from e


def check_names(*, run: str, name: str) -> None:
    """Raises ValueError if a run or actor name is invalid; names become file names and identify a group's producer."""
    for flag, value in (("run", run), ("name", name)):
        if not _NAME.fullmatch(value):
            raise ValueError(f"--{flag} must be letters, digits, '_', '.' and '-', got {value!r}")


def check_id(id_: str, run: str) -> None:
    """Raises ValueError if the run id from the store is not a plain name, and so could point outside its folders."""
    if not _NAME.fullmatch(id_):
        raise ValueError(f"the store returned the invalid id {id_!r} for run {run}; check --store")


def check_given(given: Mapping[str, str]) -> None:
    """Raises ValueError if an override is outside --config.actor.*, and so would change the run."""
    for path in given:
        if not path.startswith("actor."):
            raise ValueError(
                f"--config.{path}: expected a field of --config.actor.*, because the other fields belong to the run"
            )


def config_of(card: RunCard, given: Mapping[str, str], allowed_modules: Collection[str]) -> Config:
    """Returns the run's config with this machine's overrides. Raises ValueError if it is invalid or not allowed."""
    try:
        raw = json.loads(card.config)
        if not isinstance(raw, dict):
            raise ValueError("expected a JSON object")
        config = overrides.from_dict(raw)
    except RecursionError:
        raise ValueError(f"config of run {card.name}: cannot be read, nested too deeply") from None
    except (ValueError, TypeError) as e:
        raise ValueError(f"config of run {card.name}: cannot be read: {e}") from e
    # A folder on the learner's machine does not exist here.
    config = dataclasses.replace(config, publish=dataclasses.replace(config.publish, snapshot_dir=""))
    own = {name: "verifier" for name in config.custom_verifiers} | dict.fromkeys(
        config.custom_environments, "environment"
    )
    for name, field in own.items():
        if name not in allowed_modules:
            raise ValueError(
                f"prompts.{field}={name} of run {card.name} is custom code; review it, then set "
                f"--allow_module={name} to import it on this machine"
            )
    return overrides.apply(config, given)


def register_actor(store: ActorStore, name: str, *, location: str) -> None:
    """Registers the actor's name; waits if it is taken. Raises NameTakenError if its owner still sends heartbeats."""
    beat_s: float | None = None
    while True:
        try:
            return store.register_actor(heartbeat(name, None, None), location=location)
        except NameTakenError as e:
            if beat_s not in (None, e.beat_s):
                raise  # the owner sent another heartbeat
            if beat_s is None:
                logging.info("%s; waiting up to %.0f s for its heartbeats to stop", e, NAME_LEASE_S)
            beat_s = e.beat_s
        time.sleep(_CARD_POLL_S)


def _wait_for_run(url: str, run: str, deadline_s: float, *, retry_s: float, on_wait: Callable[[], None]) -> str:
    """Waits until a learner has created or resumed the run; returns the run's id."""
    has_said = is_waiting = False
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return find_run(url, run, retry_s=max(1.0, min(left_s, retry_s)))
        except NoRunError as e:
            if left_s <= 0:
                raise
            if isinstance(e, FinishedRunError) and not has_said:
                how_long = f"{left_s:.0f} s" if math.isfinite(left_s) else "without a timeout"
                logging.info("%s; waiting %s for a learner to resume it, or for a new run", e, how_long)
                has_said = True
        if not is_waiting:
            report_phase("waiting for a learner to acquire leadership")
            is_waiting = True
        on_wait()
        time.sleep(_CARD_POLL_S)


def _wait_for_card(store: ActorStore, run: str, deadline_s: float, *, on_wait: Callable[[], None]) -> RunCard:
    is_waiting = False
    while (card := store.run_card()) is None:
        if not is_waiting:
            report_phase("waiting for the run descriptor of the learner")
            is_waiting = True
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"timed out waiting for the run descriptor of run {run}; check that its learner is running"
            )
        on_wait()
        time.sleep(_CARD_POLL_S)
    return card
