#!/usr/bin/env bash
# Builds, tests and measures on a machine with a GPU, CUDA 12.8 or newer, torch 2.10 or newer,
# pytest, transformers and ninja, all installed: nothing is fetched. Takes under 9 minutes on 16
# cores. PYTHON chooses the interpreter; --dry runs the benchmarks on the CPU, to see that they run.
# Results go to benchmarks/results/gpu-<name>.json and .md; the table is printed last.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export GPU_RESULTS=${GPU_RESULTS:-$PWD/build/gpu} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/benchmarks
export COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
rm -rf "$GPU_RESULTS" && mkdir -p "$GPU_RESULTS"
summary=$GPU_RESULTS/summary.txt
failed=0

# stage NAME SECONDS COMMAND...: runs it, logs it, and notes how it ended.
stage() {
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  echo "== $name"
  timeout "$limit" "$@" > "$GPU_RESULTS/$name.log" 2>&1
  status=$?
  tail -n 4 "$GPU_RESULTS/$name.log"
  if [ $status -ne 0 ]; then
    failed=1
    grep -E "^(FAILED|ERROR)|error:|Error" "$GPU_RESULTS/$name.log" | head -n 20
  fi
  echo "- $name: $([ $status -eq 0 ] && echo passed || echo "failed ($status)"), $((SECONDS - begin)) s; $(tail -n 1 "$GPU_RESULTS/$name.log" | cut -c1-150)" >> "$summary"
}

if [ "${1:-}" = --dry ]; then
  arguments=(--dry)
else
  arguments=()
  stage build 180 env OVERFLOW_FAST_CUDA=1 "$python" setup.py -q build_ext --inplace
  stage tests 240 "$python" -m pytest -q --require-cuda -p no:cacheprovider
fi
stage scan 120 "$python" benchmarks/gpu/scan.py "${arguments[@]}"
stage hooks 60 "$python" benchmarks/gpu/hooks.py "${arguments[@]}"
stage variants 60 "$python" benchmarks/gpu/variants.py "${arguments[@]}"
stage models 150 "$python" benchmarks/gpu/models.py "${arguments[@]}"
stage compile 120 "$python" benchmarks/gpu/compile.py "${arguments[@]}"
if [ ${#arguments[@]} -eq 0 ] && command -v compute-sanitizer > /dev/null; then
  only=(--kernel-regex kns=scan_kernel)
  compute-sanitizer "${only[@]}" true > /dev/null 2>&1 || only=()
  few="test_layouts or test_planted_values or test_lists_of_any_length"
  for tool in memcheck racecheck initcheck; do
    left=$((530 - SECONDS))
    [ $left -lt 20 ] && { echo "- $tool: no time left" >> "$summary"; continue; }
    stage $tool $left compute-sanitizer --tool $tool --error-exitcode 9 "${only[@]}" "$python" \
      -m pytest -q -p no:cacheprovider tests/test_scan.py tests/test_cuda.py \
      -k "cuda and ($few)"
  done
fi
"$python" benchmarks/gpu/report.py "$GPU_RESULTS" || failed=1
exit $failed
