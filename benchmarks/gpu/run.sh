#!/usr/bin/env bash
# All that needs a GPU, in stages of at most 10 minutes each:
#
#   benchmarks/gpu/run.sh smoke                2 min   versions, ceilings, NCCL, a step
#   benchmarks/gpu/run.sh tests [pytest args]  9 min   tests/gpu; e.g. -k "1 on" for one rank only
#   benchmarks/gpu/run.sh bench                9 min   about 1 billion parameters, then two ranks
#   benchmarks/gpu/run.sh report [folder]      1 s     one file from what the stages left
#   benchmarks/gpu/run.sh wheels                       run where there is a network; see below
#   benchmarks/gpu/run.sh sim                  1 min   smoke on the simulated device: no GPU, no times
#
# In this order: what smoke finds missing, the others would find later. A stage leaves its part in
# benchmarks/results/gpu-run and the report in benchmarks/results; if OUT names a folder, both are
# copied there. `report` also takes a folder of parts that were brought from the GPU's machine.
#
# PYTHON is the interpreter (default python3); it must have torch with CUDA, pytest and
# pytest-timeout. What else fzero needs may come as wheels: `run.sh wheels` downloads those for
# Python 3.12 to .wheels, and the stages install them from there, beside the interpreter's own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
WHEEL_PYTHON=${WHEEL_PYTHON:-3.12}
PARTS=benchmarks/results/gpu-run
export OMP_NUM_THREADS=1 FZERO_ONE_RANK_GROUP=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

within() { # seconds command...: stop it as Ctrl-C does, so that it still reports
    timeout --signal=INT --kill-after=15 "$@"
    local status=$?
    [ "$status" -ne 124 ] || echo "run.sh: stopped after $1 s; what is missing was not run" >&2
    return "$status"
}

install_wheels() {
    compgen -G '.wheels/*.whl' >/dev/null || return 0
    local site=${TMPDIR:-/tmp}/fzero-wheels
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --target "$site" .wheels/*.whl && export PYTHONPATH="$PYTHONPATH:$site"
}

report() {
    "$PYTHON" benchmarks/gpu/merge.py "${1:-$PARTS}" benchmarks/results || return
    if [ -n "${OUT:-}" ]; then
        mkdir -p "$OUT" && cp -r "$PARTS" benchmarks/results/gpu_*.md "$OUT"
    fi
}

smoke() {
    within 240 "$PYTHON" benchmarks/gpu/smoke.py --out "$PARTS" "$@"
}

tests() {
    within 560 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider --durations=15 \
        --junitxml="$PARTS/gpu-tests.xml" "$@"
}

bench() {
    local bench=("$PYTHON" benchmarks/bench_gpu.py --out "$PARTS")
    local status=0
    within 270 "${bench[@]}" "$@" || status=$?
    within 150 "${bench[@]}" --precision masters --passes 1 --rounds 5 --blocks 1 "$@" || status=$?
    within 140 "${bench[@]}" --world 2 --layers 2 --width 1024 --vocabulary 4096 --tokens 256 \
        --rounds 2 --blocks 1 --passes 1 "$@" || status=$?
    return "$status"
}

wheels() {
    # The GPU's machine has torch and numpy; optree is compiled for each Python.
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
        --python-version "$WHEEL_PYTHON" -d .wheels \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        "$(grep '^optree==' constraints.txt)" "$(grep '^einops==' constraints.txt)" \
        "$(grep '^typing_extensions==' constraints.txt)"
}

stage=${1:-}
[ $# -eq 0 ] || shift
case "$stage" in
wheels) wheels ;;
sim) within 240 "$PYTHON" benchmarks/gpu/smoke.py --device sim "$@" ;;
report) report "$@" ;;
smoke | tests | bench)
    mkdir -p "$PARTS"
    install_wheels || exit
    "$stage" "$@"
    status=$?
    report
    exit "$status"
    ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
