#!/usr/bin/env bash
# Install funitel into a virtual environment; the one way used by the Makefile, CI and the Dockerfile.
#
#   scripts/install.sh [options] VENV
#
#   --torch cpu|cuda    which build of torch (default cpu: never pulls CUDA libraries, fails rather than do so)
#   --extras LIST       extras of the package, comma-separated (default server)
#   --lowest            the versions of constraints-lowest.txt instead of those of constraints.txt
#   --no-editable       copy the package instead of linking the sources
#   --dry-run           resolve and check everything, install nothing beyond the empty environment
#
# PYTHON names the interpreter for a new environment (default python3). INSTALLER=pip leaves uv alone, which is several
# times faster and is fetched for the occasion where it is not installed. Run again, the script does nothing until
# pyproject.toml, the versions, this script or the options change.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# Both name older releases of their libraries than they run with, so what they name is not installed.
TGI_CLIENT=text-generation==0.7.0      # huggingface-hub<1
PROTO_COMPILER=grpcio-tools==1.72.1    # protobuf<7; what it writes decides the lowest grpcio and protobuf

torch=cpu extras=server versions=constraints.txt editable=yes dry_run=no venv=
options="$*"

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

while [ $# -gt 0 ]; do
  case "$1" in
    --torch) torch=${2:?--torch needs cpu or cuda}; shift ;;
    --extras) extras=${2?--extras needs a list}; shift ;;
    --lowest) versions=constraints-lowest.txt ;;
    --no-editable) editable=no ;;
    --dry-run) dry_run=yes ;;
    -*) fail "unknown option $1" ;;
    *) venv=$1 ;;
  esac
  shift
done
[ -n "$venv" ] || fail "give the folder of the virtual environment: scripts/install.sh .venv"
case "$torch" in cpu | cuda) ;; *) fail "--torch must be cpu or cuda, given $torch" ;; esac
torch_version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)

python=$venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
has_extra() { case ",$extras," in *",$1,"*) ;; *) return 1 ;; esac; }

make_environment() {
  "$python" -m pip --version >/dev/null 2>&1 && return  # one that was interrupted while being made has no pip
  local maker=${PYTHON:-python3}
  "$maker" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$maker is $("$maker" --version 2>&1), funitel needs Python 3.11 or newer: set PYTHON"
  say "making the virtual environment $venv"
  "$maker" -m venv "$venv"
}

# Set uv to the program's path, or to nothing where it cannot be had. It gets pip's settings, which it does not read.
choose_installer() {
  uv=
  [ "${INSTALLER:-uv}" = uv ] || return 0
  eval "$("$python" scripts/pip_settings.py)"
  uv=$(command -v uv) && return
  pip install --quiet --no-deps --no-compile --constraint constraints.txt --target "$temporary/uv" uv >/dev/null 2>&1 || return 0
  uv=$temporary/uv/bin/uv
}

# install ARGUMENT...: arguments that uv and pip share. Where uv fails, pip decides, and says why.
install() {
  if [ -n "$uv" ]; then
    "$uv" pip install --quiet --python "$python" "$@" 2>/dev/null && return
    say "uv did not install that; trying pip"
  fi
  pip install --quiet "$@"
}

# The names that installing the given requirements would add, one a line; fails when they cannot be resolved.
would_install() {
  local report=$temporary/report
  export HATCH_BUILD_NO_HOOKS=true  # of the package, only what it depends on is wanted; the C++ step is not compiled
  if [ -n "$uv" ] && "$uv" pip install --python "$python" --dry-run "$@" 2>"$report"; then
    sed -n 's/^ + \([^= ]*\).*/\1/p' "$report"
  elif pip install -qq --dry-run --report "$report" "$@"; then
    "$python" -c 'import json, sys
for item in json.load(open(sys.argv[1]))["install"]: print(item["metadata"]["name"].lower())' "$report"
  else
    return 1
  fi
}

# Print which CUDA packages are among names; fails when there are none.
cuda_packages() { grep -E '^(nvidia-|cuda-|triton$)' | tr '\n' ' ' | grep .; }

# Version and CUDA version ("None" for a build for CPUs) of the torch that is installed; nothing where none can be imported.
installed_torch() { "$python" -c 'import torch; print(torch.__version__, torch.version.cuda)' 2>/dev/null || true; }

# Whether an installer left to itself would take another build of torch than is asked for, or keep a wrong one.
needs_torch() {
  has_extra server || return 1
  local found
  found=$(installed_torch)
  case "$torch $found" in
    "cpu $torch_version "* | "cpu $torch_version+"*) return 1 ;;
    cuda*None) ;;
    cuda*) return 1 ;;
  esac
}

# A build whose installation was interrupted, or that is for other hardware, is replaced.
install_torch() {
  case $torch in
    cpu) install_torch_for_cpu ;;
    cuda) [ -z "$(installed_torch)" ] || [ "$dry_run" = yes ] || install --force-reinstall --no-deps --no-compile "torch==$torch_version" ;;
  esac
}

# Install a torch without CUDA libraries; in a dry run, set torch_choice to the arguments that would.
install_torch_for_cpu() {
  local choice names cuda choices=(
    "torch==$torch_version+cpu"
    "torch==$torch_version+cpu --extra-index-url $TORCH_CPU_INDEX"
    "torch==$torch_version"
  )
  for choice in "${choices[@]}"; do
    read -ra torch_choice <<<"$choice"
    if ! names=$(would_install "${torch_choice[@]}" 2>"$temporary/problems"); then
      say "not found: $choice"
    elif cuda=$(cuda_packages <<<"$names"); then
      say "passed over: $choice would bring $cuda"
    else
      say "found: $choice"
      [ "$dry_run" = yes ] || install --force-reinstall --no-deps --no-compile "${torch_choice[@]}"
      return 0
    fi
  done
  fail "no CPU build of torch $torch_version without CUDA libraries: check the package index, or use --torch cuda. $(
    grep -v '^ *$' "$temporary/problems" | tail -1)"
}

site_packages() { "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Python compiles what is imported at its first import; compiling all that is installed takes a minute.
install_package() {
  local package=. names cuda flags=(--constraint "$versions")
  [ -z "$extras" ] || package=".[$extras]"
  if [ "$dry_run" = yes ]; then
    say "resolving $package"
    names=$(would_install "${torch_choice[@]}" "${flags[@]}" "$package")
    if [ "$torch" = cpu ] && cuda=$(cuda_packages <<<"$names"); then fail "in CPU mode, $package would bring $cuda"; fi
    say "$(wc -w <<<"$names") packages to install"
    return
  fi
  if [ "$editable" = yes ]; then flags+=(--no-compile --editable); else flags+=(--compile); fi
  say "installing $package with the versions of $versions"
  install "${flags[@]}" "$package"
  # uv takes the files of a release from one index, which may lack the one of this platform; pip takes them from all.
  "$python" -c 'import _soundfile_data' 2>/dev/null \
    || pip install --quiet --force-reinstall --no-deps --no-compile --constraint "$versions" soundfile
  if has_extra clients; then install --no-deps --no-compile "$TGI_CLIENT"; fi
  if has_extra dev; then
    install --no-deps --no-compile "$PROTO_COMPILER"
    echo "$PWD/testing" >"$(site_packages)/_funitel_testing.pth"  # for tests and benchmarks
  fi
}

# The marker has a line for each extra: what serving needs stays installed where what tests need is added.
marker=$venv/.installed
shared=${options/--extras $extras/}
state=$(cat pyproject.toml "$versions" scripts/install.sh - <<<"${shared// /}" | sha256sum | cut -c1-16)
wanted=$(tr ',' '\n' <<<"$extras" | sed "s/^/$state /")
is_current() { [ -s "$marker" ] && ! grep -qvxFf "$marker" <<<"$wanted"; }

if [ "$editable" = yes ] && [ "$dry_run" = no ] && is_current; then exit 0; fi
make_environment
choose_installer
torch_choice=()
if needs_torch; then install_torch; fi
install_package
[ "$dry_run" = no ] || exit 0
if has_extra server && [ -z "$(installed_torch)" ]; then fail "torch cannot be imported: delete $venv, and try again"; fi
others=$(grep "^$state " "$marker" 2>/dev/null || true)
printf '%s\n' "$wanted" "$others" >"$marker"
say "done: $venv has $("$python" -c 'import importlib.metadata as m; print(len({d.name for d in m.distributions()}))') packages"
