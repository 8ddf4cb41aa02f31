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

# How many files ninja has compiled in the build folder, by its log.
made() { { grep -s $'\\.o\t' build/default/.ninja_log || true; } | wc -l; }

# How many the libraries are compiled from; 0 as long as nobody knows.
needed() {
    { ninja -C build/default -t commands pyspec-libs 2>/dev/null || true; } |
        { grep -E -- ' -o [^ ]+\.o ' || true; } | wc -l
}

# Says now and then how many were compiled since there were BEFORE, and of how many where not all were
# before: later builds compile what changed. Says nothing while there are no more.
compiled() { # BEFORE [SECONDS]
    local before=$1 told=$1 now total
    while sleep "${2:-10}" >/dev/null 2>&1 9>&-; do
        now=$(made)
        [ "$now" -gt "$told" ] || continue
        told=$now now=$((now - before)) total=$(($(needed) - before))
        if [ $total -ge $now ]; then now+=" of $total"; fi
        echo "    $now files compiled"
    done
}
