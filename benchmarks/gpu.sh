#!/usr/bin/env bash
# Everything that needs a GPU, in at most ten minutes on one; with --cpu the same at toy size, to
# check the script itself.
#
#   benchmarks/gpu.sh [--cpu] [--sections tests,train,recover,decode] [--out DIR]
#
# tests    tests marked `gpu`
# train    tokens/s, MFU and peak memory at one billion random parameters: next token and
#          distillation, sdpa, flash attention where it is installed, and compiled
# recover  a small multi-head model trained on the bundled text, converted to one KV head, uptrained:
#          perplexity against tokens
# decode   time per token against context with 32, 8 and 1 KV heads at batch 1 and 32
#
# Needs no network: models are made here. Every section writes into DIR, and a failing one does not
# keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."

cpu=false sections=tests,train,recover,decode out=runs/gpu
while [[ $# -gt 0 ]]; do
  case $1 in
    --cpu) cpu=true; shift ;;
    --sections) sections=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

if $cpu; then
  export CUDA_VISIBLE_DEVICES=
  device=cpu big=(--layers 2 --hidden 128 --heads 8 --vocabulary 2048) big_heads=(8 2 1)
  small=(--layers 2 --hidden 128 --heads 4 --vocabulary 2048 --context 1024)
  train=(--context 64 --micro-batch 2 --steps 2 --runs 1) variants=("sdpa")
  scratch_steps=20 recover_tokens=8192 measure_every=4096
  contexts=64,256 batches=1,2 repeats=1
else
  device=cuda big=() big_heads=(32 8 1)
  small=(--layers 8 --hidden 512 --heads 8 --vocabulary 2048 --context 1024)
  train=(--context 2048 --micro-batch 8 --steps 8 --runs 1) variants=("sdpa" "sdpa --compile")
  python -c "import flash_attn" 2>/dev/null && variants+=("flash_attention_2")
  scratch_steps=600 recover_tokens=5242880 measure_every=524288
  contexts=2k,8k,32k batches=1,32 repeats=3
fi

section() { # NAME COMMAND...: run one section, note how long it took and whether it failed
  local name=$1 begun=$SECONDS
  shift
  [[ ,$sections, == *,$name,* ]] || return 0
  echo "== $name" >&2
  "$@" || failed+=("$name")
  echo "== $name took $((SECONDS - begun)) s" >&2
}

run_tests() {
  # Without a GPU every one is skipped, with its reason.
  pytest -m "gpu or multi_gpu" -n 0 -rs 2>&1 | tee "$out/tests.txt"
  local code=${PIPESTATUS[0]}
  [[ $code -eq 0 || $code -eq 5 ]]
}

run_train() {
  python benchmarks/random_llama.py "$work/big" "${big[@]}" || return 1
  gqaconvert convert "$work/big" "$work/big-gqa" --kv-heads "${big_heads[1]}" || return 1
  local code=0 number=0 variant
  for variant in "${variants[@]}"; do
    echo "### $variant"
    # shellcheck disable=SC2086 # a variant is words
    python benchmarks/uptrain.py "$work/big-gqa" --source "$work/big" "${train[@]}" \
      --attn $variant --out "$out/train-$((number++)).json" || code=1
  done | tee "$out/train.md"
  return "${PIPESTATUS[0]:-$code}"
}

run_recover() {
  python benchmarks/random_llama.py "$work/small" "${small[@]}" || return 1
  cat > "$work/scratch.yaml" <<YAML
version: 1
source: {model: $work/small}
convert: {kv_heads: 1}
uptrain:
  start: $work/small
  data: {datasets: [{path: bundled}], context: 512}
  loss: {next_token: 1.0, distill: 0.0}
  budget: {steps: $scratch_steps}
  batch_tokens: 32768
  micro_batch: 16
  lr: 1.0e-3
  held_out: {text: bundled, every_steps: 100, windows: 16}
YAML
  local scale=()
  $cpu && scale=(--set uptrain.batch_tokens=1024 --set uptrain.data.context=64)
  gqaconvert uptrain "$work/scratch.yaml" --out "$work/scratch" "${scale[@]}" || return 1
  gqaconvert convert "$work/scratch/model" "$work/small-mqa" --kv-heads 1 || return 1
  python benchmarks/recovery.py "$work/scratch/model" --start mean="$work/small-mqa" \
    --train bundled --test bundled --losses distill,next-token --tokens "$recover_tokens" \
    --measure-every "$measure_every" --batch-tokens $($cpu && echo 1024 || echo 32768) \
    --context $($cpu && echo 64 || echo 512) --micro-batch $($cpu && echo 2 || echo 16) \
    --lr 5e-4 --out "$out/recovery" --figure "$out/recovery.svg" | tee "$out/recovery.md"
  return "${PIPESTATUS[0]}"
}

run_decode() {
  [[ -d $work/big ]] || python benchmarks/random_llama.py "$work/big" "${big[@]}" || return 1
  local heads models=("$work/big")
  for heads in "${big_heads[@]:1}"; do
    gqaconvert convert "$work/big" "$work/kv$heads" --kv-heads "$heads" || return 1
    models+=("$work/kv$heads")
  done
  gqaconvert bench "${models[@]}" --device "$device" --context "$contexts" --batch "$batches" \
    --repeats "$repeats" --out "$out/decode"
}

section tests run_tests
section train run_train
section recover run_recover
section decode run_decode
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
echo "results in $out" >&2
