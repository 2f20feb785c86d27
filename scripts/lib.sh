# Shared by scripts/quickstart and scripts/test: a virtual environment of this checkout in .venv.

# The newest interpreter on PATH that the project supports.
find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$python" >/dev/null &&
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    echo "error: no Python 3.10 or newer on PATH" >&2
    echo "  next: install one, for example: apt-get install python3 python3-venv" >&2
    return 1
}

# make_venv EXTRAS: install the checkout, editable, unless the same pyproject.toml is installed already.
make_venv() {
    local extras=$1 python stamp wanted
    python=$(find_python)
    stamp=.venv/.installed$extras
    wanted=$(cksum <pyproject.toml)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c 'import toolkit' 2>/dev/null; then
        return
    fi
    echo "+ $python -m venv .venv && pip install -e .$extras" >&2
    if ! "$python" -m venv .venv; then
        echo "error: this Python cannot make virtual environments" >&2
        echo "  next: apt-get install python3-venv" >&2
        return 1
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".$extras"
    echo "$wanted" >"$stamp"
}
