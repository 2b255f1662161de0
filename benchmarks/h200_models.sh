#!/usr/bin/env bash
# The decode-step tables of the H200 report: real transformers models, interleaved with accelerate and diffusers.
# Usage: benchmarks/h200_models.sh OUT_FOLDER qwen|compile|deepseek|experts|ablation...
set -u
out=$1
here=$(dirname "${BASH_SOURCE[0]}")
run() { python3 "$here/$1" --out "$out/$name.jsonl" "${@:2}" 2>&1 | tail -60 | cut -c1-200; }
for name in "${@:2}"; do
  case $name in
    qwen) run decode_step.py --model qwen3-8b --rows 1,16 --rounds 3 --repeats 4 \
      --variants resident+graph,even:0.25,group:4/1/2,even:0.25+graph,group:1/1/2,accelerate,diffusers ;;
    compile) run decode_step.py --model qwen3-8b --rows 1 --rounds 3 --repeats 6 --variants still:0.25+compile,even:0.25+compile ;;
    deepseek) run decode_step.py --model deepseek-v2-lite --rows 1,2,4,8,16 --rounds 3 --repeats 4 \
      --variants resident+graph,group:4/1/2+graph,group:4/1/2+fresh ;;
    experts) run decode_step.py --model deepseek-v2-lite --rows 1 --rounds 3 --repeats 4 \
      --variants resident+graph,experts+graph,experts,unselected+graph ;;
    ablation) run step_ablation.py --rows 1,2048 --rounds 3 --repeats 5 \
      --variants group:4/1/1,group:4/1/2,group:4/1/3,group:4/1/2+tensors,group:4/1/2+eager,group:4/1/2+fresh,even:0.25,even:0.25+tensors,even:0.25+eager ;;
    *) echo "$name: expected qwen, compile, deepseek, experts or ablation" >&2; exit 1 ;;
  esac
done
