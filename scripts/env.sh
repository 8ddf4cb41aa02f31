# Sourced by the scripts beside it: goes to the repository and sets $venv, the Python environment
# in use: the active one, else .venv.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VIRTUAL_ENV:-$PWD/.venv}
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH

fail() {
    echo "error: $*" >&2
    exit 1
}
