#!/usr/bin/env bash
# Creates .venv and installs Sluice into it. Run it as often as you like: a finished set-up takes no time.
#
#   bash launch/setup.sh              everything on CPU, from launch/lock-cpu.txt (or what .venv already is)
#   bash launch/setup.sh gpu,dev      other extras of pyproject.toml (gpu, cuda, tpu, learner, actor), by pip's resolver
#
# Where an actor is installed it also wants bubblewrap, which code rewards need: by apt as root, else it says the command.
#
# SLUICE_PYTHON=/path/to/python3.x picks the interpreter (3.11 or newer). The full log is .venv/setup.log.
set -Eeuo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"

venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.sluice-stamp"   # line 1: hash of what was installed; line 2: which extra
log="$venv/setup.log"
lock="launch/lock-cpu.txt"
torch_index="https://download.pytorch.org/whl/cpu"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }

fail() {
  trap - ERR
  printf '\n[setup] FAILED: %s\n' "$1" >&2
  if [ -s "$log" ]; then
    printf '[setup] last lines of .venv/setup.log:\n' >&2
    tail -n 20 "$log" | sed 's/^/    /' >&2
  fi
  printf '[setup] Fix the cause and run it again; it goes on from where it stopped.\n' >&2
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

# On a terminal the log's last line, in one line that changes, for as long as this shell lives: pip is silent for minutes.
show_log() {
  local columns
  columns="$(tput cols 2>/dev/null || echo 80)"
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    printf '\r\033[K%.*s' "$((columns - 1))" "[setup ${SECONDS}s]   $(tail -n 1 "$log" | tr -d '\r')"
  done
}

pip_install() {
  local watcher="" code=0
  if [ -t 1 ]; then show_log & watcher=$!; fi
  "$python" -m pip install --progress-bar off --no-compile "$@" >>"$log" 2>&1 || code=$?
  if [ -n "$watcher" ]; then
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    printf '\r\033[K'
  fi
  return "$code"
}

# What pip would do on one core, and half of its time. Some packages bring files that no Python compiles.
compile_all() { "$python" -m compileall -q -j 0 "$venv"/lib/python3*/site-packages >>"$log" 2>&1 || true; }

# True for a Python that is new enough and can make a virtual environment.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

pick_base() {
  local name path
  if [ -n "${SLUICE_PYTHON:-}" ]; then
    usable "$SLUICE_PYTHON" || fail "SLUICE_PYTHON=$SLUICE_PYTHON is not a Python >= 3.11 with venv and ensurepip"
    echo "$SLUICE_PYTHON"
    return
  fi
  # 3.11 first: the lock was tested on it.
  for name in python3.11 python3.12 python3.13 python3; do
    while read -r path; do
      if usable "$path"; then echo "$path"; return; fi
    done < <(type -aP "$name" || true)
  done
  fail "no Python >= 3.11 with venv and ensurepip on PATH; install one (Debian: python3-venv) or set SLUICE_PYTHON"
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

# Ours, running, and made for this folder: a moved copy has console scripts that point elsewhere.
venv_is_sound() {
  [ -x "$python" ] && usable "$python" && grep -qF "$venv" "$venv/bin/activate" 2>/dev/null &&
    { [ -z "${SLUICE_PYTHON:-}" ] || [ "$(version_of "$SLUICE_PYTHON")" = "$(version_of "$python")" ]; }
}

wanted_hash() {
  { echo "$extra"; version_of "$python"; cat pyproject.toml launch/setup.sh; [ "$extra" != cpu ] || cat "$lock"; } |
    sha256sum | cut -d' ' -f1
}

# pip writes INSTALLER last: without it the package was cut off half-way, and pip would believe it is there.
drop_half_installed() {
  local info
  for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
    [ -d "$info" ] && [ ! -e "$info/INSTALLER" ] || continue
    say "repairing $(basename "$info" .dist-info), left half installed"
    rm -rf "$info"
  done
}

install_cpu_torch() {
  local want
  want="$(grep -m1 '^torch==' "$lock")"
  if [ "torch==$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)" = "$want" ]; then
    return 0
  fi
  # Short timeout, few retries: an index that can't be reached must not hold us up.
  say "$want from pip's own sources"
  pip_install --no-deps --timeout 15 --retries 1 "$want" && return 0
  say "not there; trying PyTorch's CPU index"
  pip_install --no-deps --timeout 15 --retries 1 --index-url "$torch_index" "$want" && return 0
  fail "$want is neither in pip's configured sources nor to be had from $torch_index.
[setup] Without access to that index, download the wheel elsewhere, put it in a folder and point pip at it:
[setup]   PIP_FIND_LINKS=/folder/with/the/wheel bash launch/setup.sh"
}

install_cpu() {
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "launch/lock-cpu.txt is for Linux x86_64, this is $(uname -sm); use an extra instead"
  # What a plain `pip install .[cpu]` would bring; beside CPU torch they break transformers.
  "$python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
  install_cpu_torch
  say "$(wc -l <"$lock") locked packages (about 3 minutes the first time)"
  pip_install --no-deps -r "$lock" || fail "installing $lock"
  say "sluice itself, editable"
  pip_install --no-deps --no-build-isolation -e . || fail "installing sluice from this folder"
}

install_extra() {
  say "sluice[$extra] by pip's resolver (several minutes the first time)"
  pip_install -e ".[$extra]" || fail "installing sluice[$extra]"
}

# True for what brings an actor, which runs programs that a policy wrote.
wants_bubblewrap() { [[ ",$extra," =~ ,(cpu|gpu|actor), ]]; }

tell_of_bubblewrap() {
  if wants_bubblewrap && ! command -v bwrap >/dev/null; then
    say "bubblewrap is not installed: code rewards will be refused, all else works. As root: apt-get install bubblewrap"
  fi
}

# Nothing but code rewards needs it, so a machine without apt or a network is set up all the same.
install_bubblewrap() {
  if ! wants_bubblewrap || command -v bwrap >/dev/null; then return 0; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "bubblewrap, for code rewards"
    apt_bubblewrap || { timeout 120 apt-get update >>"$log" 2>&1 && apt_bubblewrap; } || true
  fi
  tell_of_bubblewrap
}

apt_bubblewrap() {
  DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install -y --no-install-recommends bubblewrap >>"$log" 2>&1
}

# Metadata only, so it is quick; torchvision is imported, but only where it exists.
check() {
  "$python" - "$extra" "$lock" >>"$log" 2>&1 <<'PY' || fail "the environment is not what was asked for"
import importlib.util
import pathlib
import sys
from importlib import metadata

extra, lock = sys.argv[1], pathlib.Path(sys.argv[2])
wrong = []


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if extra == "cpu":
    for line in lock.read_text().split():
        name, want = line.split("==")
        if (got := installed(name)) != want:
            wrong.append(f"{name}: wanted {want}, got {got}")
wrong += [f"{module}: not importable" for module in ("bridge", "configs") if importlib.util.find_spec(module) is None]
plugins = {e.name: e.value for e in metadata.entry_points(group="vllm.general_plugins")}
if plugins.get("sluice") != "actor.vllm.weights:register":
    wrong.append(f"entry point vllm.general_plugins/sluice: got {plugins.get('sluice')}")
if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401
    except Exception as e:
        wrong.append(f"torchvision is installed but broken ({e}); text models don't need it: uninstall it")
print("\n".join(wrong) or "environment verified")
sys.exit(bool(wrong))
PY
}

wrong_use() {
  echo "error: $1" >&2
  exit 2
}
case "${1:-}" in -h | --help) exec sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' launch/setup.sh ;; esac
[ $# -le 1 ] || wrong_use "one argument at most, got: $*"
# A new environment is made by emptying .venv first, and through a link that would be somebody else's.
[ ! -L "$venv" ] || fail "$venv is a link to $(readlink "$venv"), which is not this folder's to change: remove the link"
extra="${1:-$(sed -n 2p "$stamp" 2>/dev/null || true)}"
extra="${extra:-cpu}"
[[ "$extra" =~ ^[a-z][a-z-]*(,[a-z][a-z-]*)*$ ]] || wrong_use "'$extra' is not an extra: bash launch/setup.sh --help shows what there is"

# One set-up at a time. The lock is on this folder itself: .venv may be wiped below.
if command -v flock >/dev/null; then
  exec 9<"$root/launch"
  flock -n 9 || { say "another set-up is running; waiting for it"; flock 9; }
fi

if venv_is_sound && [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$(wanted_hash)" ]; then
  say "up to date ($extra)"
  tell_of_bubblewrap
  exit 0
fi

if ! venv_is_sound; then
  base="$(pick_base)" || exit 1
  say "new .venv with Python $(version_of "$base")"
  "$base" -m venv --clear "$venv" || fail "$base -m venv"
fi
rm -f "$stamp"
printf '== %s: %s\n' "$(date -u +%FT%TZ)" "$extra" >"$log"
drop_half_installed
if [ "$extra" = cpu ]; then install_cpu; else install_extra; fi
install_bubblewrap
say "compiling to bytecode"
compile_all
say "checking"
check
printf '%s\n%s\n' "$(wanted_hash)" "$extra" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
say "ready: .venv ($extra)"
