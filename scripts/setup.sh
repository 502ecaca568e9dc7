#!/usr/bin/env bash
# Creates a virtual environment and installs the project with its tested versions.
# Safe to run again: nothing is done when the environment is up to date.
#
#   scripts/setup.sh            into .venv
#   scripts/setup.sh DIR        into DIR
#   PYTHON=python3.12 scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${1:-.venv}"

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup.sh: no Python 3.11 or newer found; set PYTHON to one" >&2
  exit 2
}

# What the installation depends on; written last, so that a broken installation starts over.
wanted="$(pwd -P) $(cat pyproject.toml constraints.txt | cksum)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/installed-from" 2>/dev/null)" = "$wanted" ]; then
  echo "setup.sh: $venv is up to date"
  exit 0
fi

python="$(find_python)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
echo "$wanted" >"$venv/installed-from"
echo "setup.sh: installed into $venv"
