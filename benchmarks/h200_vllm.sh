#!/usr/bin/env bash
# The runs of the report on vLLM. vLLM and headrace have to be importable by python3, and `vllm` on the path for replicas.
# Usage: [GPU=0] benchmarks/h200_vllm.sh OUT_FOLDER flags|experts|features|ranks|replicas...
# Each name is a contest with a folder of its own and one cache of compiled code per GPU; several scripts may run at
# once, on GPUs of their own (ranks and replicas take two). Tokens are compared within a folder.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=$1
if [ -n "${GPU:-}" ]; then export CUDA_VISIBLE_DEVICES=$GPU; fi
export VLLM_CACHE_ROOT=$out/cache${GPU:-} TORCHINDUCTOR_CACHE_DIR=$out/inductor${GPU:-} TRITON_CACHE_DIR=$out/triton${GPU:-}
measure() {
  mkdir -p "$out/$1"
  python3 benchmarks/vllm_offload.py "$out/$1" "${@:2}" 2>&1 | tee -a "$out/$1.txt"
}
for name in "${@:2}"; do
  case $name in
    flags) measure flags resident headrace budget vllm ;;
    experts) for turn in 1 2; do measure "experts-$turn" moe-vllm moe-headrace; done
      measure experts-1 moe-prefetch ;;
    features) measure draft draft-short headrace-draft-short
      measure short short-v1 headrace-short-v1 ;;
    ranks) measure ranks pp headrace-pp tp headrace-tp ;;
    # Small, so that other engines can be on the same GPUs.
    replicas) python3 benchmarks/vllm_replicas.py "$out/replicas" --servers resident "one copy" \
      --gpu-memory-utilization 0.2 --kv-cache-memory-bytes 4294967296 \
      --compilation-config '{"cudagraph_capture_sizes": [1]}' 2>&1 | tee -a "$out/replicas.txt" ;;
    *) echo "$name: expected flags, experts, features, ranks or replicas" >&2; exit 1 ;;
  esac
done
