#!/usr/bin/env bash
# Entry point on Amazon SageMaker: its variables become the launcher's, and it asks /ping and /invocations on port 8080.
set -euo pipefail

if [ -z "${HF_MODEL_ID:-}" ]; then
  echo "error: HF_MODEL_ID is not set: give the model to serve" >&2
  exit 1
fi
export MODEL_ID="$HF_MODEL_ID"
if [ -n "${HF_MODEL_REVISION:-}" ]; then export REVISION="$HF_MODEL_REVISION"; fi
if [ -n "${SM_NUM_GPUS:-}" ]; then export NUM_SHARD="$SM_NUM_GPUS"; fi
if [ -n "${HF_MODEL_QUANTIZE:-}" ]; then export QUANTIZE="$HF_MODEL_QUANTIZE"; fi
if [ -n "${HF_MODEL_TRUST_REMOTE_CODE:-}" ]; then export TRUST_REMOTE_CODE="$HF_MODEL_TRUST_REMOTE_CODE"; fi

if [ "${1:-}" = serve ]; then shift; fi # SageMaker's own argument
exec text-generation-launcher --port 8080 "$@"
