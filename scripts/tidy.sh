#!/usr/bin/env bash
# clang-tidy on the .cpp files named, or on those that differ from main: tidy.sh <build folder> [file...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
PATH=$(dirname "$(command -v "$python")"):$PATH
build=$1
shift
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  base=$(git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)
  mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- 'csrc/*.cpp')
fi
[ ${#files[@]} -eq 0 ] && { echo "lint-tidy: no .cpp file differs from main; name some with FILES="; exit 0; }
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${MAX_JOBS:-2}" clang-tidy -p "$build" --quiet
