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
