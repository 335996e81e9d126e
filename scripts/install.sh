#!/usr/bin/env bash
# Install funitel into a virtual environment; the one way used by the Makefile, CI and the Dockerfile.
#
#   scripts/install.sh [options] VENV
#
#   --torch cpu|cuda    which build of torch (default cpu: never pulls CUDA libraries, fails rather than do so)
#   --extras LIST       extras of the package, comma-separated (default server,dev,clients)
#   --no-editable       copy the package instead of linking the sources
#   --dry-run           resolve and check everything, install nothing beyond the empty environment
#
# PYTHON names the interpreter for a new environment (default python3). Run again, it does nothing until
# pyproject.toml, this script or the options change.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
TGI_CLIENT=text-generation==0.7.0

torch=cpu extras=server,dev,clients editable=yes dry_run=no venv=
options="$*"

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

while [ $# -gt 0 ]; do
  case "$1" in
    --torch) torch=${2:?--torch needs cpu or cuda}; shift ;;
    --extras) extras=${2?--extras needs a list}; shift ;;
    --no-editable) editable=no ;;
    --dry-run) dry_run=yes ;;
    -*) fail "unknown option $1" ;;
    *) venv=$1 ;;
  esac
  shift
done
[ -n "$venv" ] || fail "give the folder of the virtual environment: scripts/install.sh .venv"
case "$torch" in cpu | cuda) ;; *) fail "--torch must be cpu or cuda, given $torch" ;; esac

python=$venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

make_environment() {
  "$python" -m pip --version >/dev/null 2>&1 && return  # one that was interrupted while being made has no pip
  local maker=${PYTHON:-python3}
  "$maker" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$maker is $("$maker" --version 2>&1), funitel needs Python 3.11 or newer: set PYTHON"
  say "making the virtual environment $venv"
  "$maker" -m venv "$venv"
}

# What pip would add for the given requirements, as NAME==VERSION, one a line; fails when pip cannot resolve them.
would_install() {
  local report
  report=$(mktemp)
  # pip builds a wheel to learn what it depends on; without the hooks of the build the C++ step is not compiled for it.
  HATCH_BUILD_NO_HOOKS=true pip install -qq --dry-run --report "$report" "$@" || { rm -f "$report"; return 1; }
  "$python" -c 'import json, sys
for item in json.load(open(sys.argv[1]))["install"]: print("{name}=={version}".format(**item["metadata"]).lower())' "$report"
  rm -f "$report"
}

# Print which CUDA packages the requirements would bring; fails when there are none.
cuda_packages() { grep -oE '^(nvidia-|cuda-|triton=)[^=]*' | tr -d '=' | tr '\n' ' '; }

# Set torch_choice to pip arguments that bring a torch without CUDA libraries.
choose_torch_for_cpu() {
  local choice names cuda choices=(
    "torch==$TORCH_VERSION+cpu"
    "torch==$TORCH_VERSION+cpu --extra-index-url $TORCH_CPU_INDEX"
    "torch==$TORCH_VERSION"
  )
  for choice in "${choices[@]}"; do
    read -ra torch_choice <<<"$choice"
    if ! names=$(would_install "${torch_choice[@]}" 2>/dev/null); then
      say "not found: $choice"
    elif cuda=$(cuda_packages <<<"$names"); then
      say "passed over: $choice would bring $cuda"
    else
      say "found: $choice"
      return
    fi
  done
  fail "no CPU build of torch $TORCH_VERSION without CUDA libraries: check the package index, or use --torch cuda"
}

site_packages() { "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

needs_torch() {
  case ",$extras," in *,server,*) ;; *) return 1 ;; esac
  ! "$python" -c 'import torch' 2>/dev/null
}

install_package() {
  local package=. resolved cuda pinned editable_flag=() compile_flag=()
  [ -z "$extras" ] || package=".[$extras]"
  # Python compiles what is imported at its first import; compiling all that is installed takes a minute.
  [ "$editable" = no ] || editable_flag=(--editable) compile_flag=(--no-compile)
  say "resolving $package"
  resolved=$(would_install "${torch_choice[@]}" "$package")
  if [ "$torch" = cpu ] && cuda=$(cuda_packages <<<"$resolved"); then
    fail "in CPU mode, $package would bring $cuda"
  fi
  say "$(wc -w <<<"$resolved") packages to install"
  [ "$dry_run" = no ] || return 0
  mapfile -t pinned < <(grep -v '^funitel==' <<<"$resolved")
  [ ${#pinned[@]} = 0 ] || pip install --no-deps "${compile_flag[@]}" "${torch_choice[@]:1}" "${pinned[@]}"
  pip install --no-deps "${editable_flag[@]}" .
  [ "$editable" = no ] || echo "$PWD/testing" >"$(site_packages)/_funitel_testing.pth"  # for tests and benchmarks
  # Its metadata asks for huggingface-hub<1 and would drag transformers back by a major version; it runs without.
  case ",$extras," in *,clients,*) pip install --no-deps "$TGI_CLIENT" ;; esac
}

stamp=$venv/.installed
current=$(cat pyproject.toml "$0" - <<<"$options" | sha256sum)
if [ "$editable" = yes ] && [ "$dry_run" = no ] && [ "$current" = "$(cat "$stamp" 2>/dev/null)" ]; then
  exit 0
fi
make_environment
torch_choice=()
if [ "$torch" = cpu ] && needs_torch; then choose_torch_for_cpu; fi
install_package
[ "$dry_run" = yes ] || echo "$current" >"$stamp"
say "done: $venv"
