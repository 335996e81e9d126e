#!/usr/bin/env bash
# Write the code generated from the .proto files beside them; with --check, only compare and fail when it is stale.
#   PYTHON=.venv/bin/python scripts/proto.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."

out=.
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi

# generate ROOT FILE: FILE is relative to ROOT, and so is what it becomes.
generate() {
  local root=$1 file=$2
  mkdir -p "$out/$root"
  "${PYTHON:-python3}" -m grpc_tools.protoc -I "$root" --python_out="$out/$root" --pyi_out="$out/$root" \
    --grpc_python_out="$out/$root" "$root/$file"
  [ "$out" = . ] || compare "$root/${file%.proto}"
}

compare() {
  local end
  for end in _pb2.py _pb2.pyi _pb2_grpc.py; do
    diff -u "$1$end" "$out/$1$end" || { echo "error: $1$end is stale: run make proto" >&2; exit 1; }
  done
}

generate proto funitel/proto/generate.proto
generate integration-tests/contract contract_v3.proto
