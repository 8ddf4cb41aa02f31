# Sourced by the scripts beside it: goes to the repository and sets $venv, the Python environment
# in use: the active one, else .venv.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VIRTUAL_ENV:-$PWD/.venv}
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH

fail() {
    echo "error: $*" >&2
    exit 1
}

# Wait for other scripts that build here: ninja does not guard a build folder against a second one.
# The lock is held until the calling shell ends.
lock() {
    mkdir -p build
    if command -v flock >/dev/null; then
        exec 9>build/.lock
        flock 9
    fi
}

# How many files ninja has made in the build folder: its log has a line for each, and a first one.
made() {
    local log=build/default/.ninja_log
    if [ -f $log ]; then echo $(($(wc -l <$log) - 1)); else echo 0; fi
}

# Says now and then how many were made since there were BEFORE, and nothing while there are no more.
compiled() { # BEFORE [SECONDS]
    local told=$1 now
    while sleep "${2:-10}" >/dev/null 2>&1 9>&-; do
        now=$(made)
        [ "$now" -le "$told" ] || echo "    $((now - $1)) files compiled"
        told=$now
    done
}
