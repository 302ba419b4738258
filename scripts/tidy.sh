#!/usr/bin/env bash
# clang-tidy on .cpp files of csrc/ that the build folder compiles: tidy.sh <build folder> [all | file...]; without a file,
# on those that differ from main. TIDY_FLAGS is passed on; PYTHON names the environment that has clang-tidy.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
PATH=$(dirname "$(command -v "$python")"):$PATH
build=$1
shift
if [ $# -eq 0 ]; then
  base=$(git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)
  mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- 'csrc/*.cpp')
elif [ "$1" = all ]; then
  mapfile -t files < <(find csrc -name '*.cpp' | sort)
else
  files=("$@")
fi
compiled=()
for file in "${files[@]}"; do
  if grep -q "\"file\": \"$PWD/$file\"" "$build/compile_commands.json"; then
    compiled+=("$file")
  else
    echo "lint-tidy: $file is not in this build"
  fi
done
echo "lint-tidy: ${#compiled[@]} files"
[ ${#compiled[@]} -eq 0 ] ||
  printf '%s\0' "${compiled[@]}" |
  xargs -0 -n 1 -P "${MAX_JOBS:-2}" clang-tidy -p "$build" --quiet ${TIDY_FLAGS:-} 2> >(grep -v 'warnings\? generated' >&2)
