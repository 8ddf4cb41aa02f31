#!/bin/sh
# Measures every part of tests/bench/must_show.py into docs/data.
#
#   scripts/measure_all.sh LLAMA_SERVER SYNTHETIC.gguf [PART ...]
#
# LLAMA_SERVER is stock llama.cpp's program of the pinned version, SYNTHETIC.gguf the 0.8B shape:
#
#   python scripts/make_synthetic.py qwen35-0.8b SYNTHETIC.gguf --layers 8 --type Q4_0
#
# RUN names a command that runs each part, such as one that keeps the machine quiet meanwhile.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | head -10
    exit 2
fi
server=$1 synthetic=$2
shift 2
cd "$(dirname "$0")/.."
type=$(basename "$synthetic" .gguf)
[ $# -gt 0 ] || set -- $(python tests/bench/must_show.py list | awk '{ print $1 }')
for part; do
    case $part in
        synthetic* | orchestration | memory-synthetic) label="--label $type" ;;
        *) label="" ;;
    esac
    echo "== $part"
    # shellcheck disable=SC2086
    ${RUN:-} python tests/bench/must_show.py run "$part" --server "$server" \
        --synthetic "$synthetic" $label
done
