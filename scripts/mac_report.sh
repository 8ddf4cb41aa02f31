#!/usr/bin/env bash
# On a Mac: build, test the tree ops on the GPU against the CPU, measure, and write a report to send.
#
# Usage: scripts/mac_report.sh [MODEL]      MODEL: a GGUF, or demo (the default)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[ "$(uname)" = Darwin ] || fail "this is for a Mac; on Linux see docs/metal.md"
model=${1:-demo}
report=$PWD/mac_report.txt
tests=build/default/tests

section() { # TITLE COMMAND...: its output and exit status, whatever happens
    echo "=== $1"
    shift
    "$@" 2>&1
    echo "--- exit status $?"
}

ops() { # MODE OP
    "$tests/test-backend-ops" "$1" -b MTL0 -o "$2" | grep -Ev ': (.\[1;32m)?OK|not supported'
    return "${PIPESTATUS[0]}"
}

main() {
    section machine sysctl -n machdep.cpu.brand_string hw.memsize
    section system sw_vers
    section compiler xcrun --version
    section commit git rev-parse HEAD
    section setup scripts/setup test
    section build cmake --build build/default --target pyspec-tests
    for op in SSM_CONV_TREE GATED_DELTA_NET_TREE SSM_CONV GATED_DELTA_NET; do
        section "test $op" ops test "$op"
    done
    for op in SSM_CONV_TREE GATED_DELTA_NET_TREE GATED_DELTA_NET; do
        section "speed of $op" ops perf "$op"
    done
    section info pyspec info "$model" --gpu-layers 99
    section "on the GPU" pyspec bench "$model" --gpu-layers 99
    section "on the CPU" pyspec bench "$model" --gpu-layers 0
}

main | tee "$report"
echo "The report is in $report"
