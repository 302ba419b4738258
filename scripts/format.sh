#!/usr/bin/env bash
# Formats our C++, CUDA and Python in place; with --check only reports, and fails if a file would change.
# PYTHON names the environment that has clang-format and ruff.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$(command -v "$python")")
PATH=$bin:$PATH
mode=${1:-}

mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- \
  '*.h' '*.cpp' '*.cu' '*.cuh' | while read -r file; do [ -f "$file" ] && echo "$file"; done)
if [ "$mode" = --check ]; then
  [ ${#sources[@]} -eq 0 ] || clang-format --dry-run -Werror "${sources[@]}"
  ruff format --check .
else
  [ ${#sources[@]} -eq 0 ] || clang-format -i "${sources[@]}"
  ruff format .
fi
