# Sourced by the other scripts: makes .venv and installs the project into it, again only if pyproject.toml changed.
# usage: install EXTRAS, where EXTRAS is empty or for example "[dev]"

PYTHON=.venv/bin/python

find_python() {
    local candidate
    for candidate in "${PYTHON_FOR_VENV:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed; name one in PYTHON_FOR_VENV" >&2
    return 2
}

install() {
    local extras=$1 stamp=".venv/installed$1" wanted python
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then # missing, or left half made
        python=$(find_python)
        echo "making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
    fi
    wanted=$(cksum <pyproject.toml)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing the project$extras into .venv (torch is large: a few minutes)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".$extras"
        echo "$wanted" >"$stamp"
    fi
}
