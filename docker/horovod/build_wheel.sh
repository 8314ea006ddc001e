#!/usr/bin/env bash
# Builds Horovod's wheel from its PyPI sdist and prints the wheel's path; a wheel built before is found in the cache.
#
#   build_wheel.sh PYTHON
#
# PYTHON is an interpreter whose environment already holds torch, setuptools, wheel, packaging, cloudpickle, psutil,
# pyyaml, cffi and numpy. The cache lies under ${XDG_CACHE_HOME:-~/.cache}/sparkdl, one folder for each version of
# Horovod, torch and Python. HOROVOD_GPU_OPERATIONS=NCCL in the environment builds with NCCL (and is part of the key).
set -euo pipefail
python=$1
here=$(cd "$(dirname "$0")" && pwd)
version=0.28.1
tag=$("$python" -c 'import sys, torch; print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sparkdl/wheels/horovod-$version-$tag-${HOROVOD_GPU_OPERATIONS:-cpu}
find_wheel() { find "$1" -name 'horovod-*.whl' -print -quit 2>/dev/null || true; }
wheel=$(find_wheel "$cache")
if [ -z "$wheel" ]; then
  build=$(mktemp -d "${TMPDIR:-/tmp}/sparkdl-horovod.XXXXXX")
  trap 'rm -rf "$build"' EXIT
  echo "Building Horovod $version for $tag, once per user: two to three minutes." >&2
  if ! HOROVOD_CMAKE="$here/cmake-cxx20" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS="-j$(nproc)" \
    "$python" -m pip wheel --quiet --no-build-isolation --no-deps --no-cache-dir \
    -w "$build" "horovod==$version" >"$build/log" 2>&1; then
    tail -n 40 "$build/log" >&2
    echo "Horovod $version did not build: its last 40 lines stand above." >&2
    exit 1
  fi
  echo "Built Horovod's wheel in ${SECONDS} s." >&2
  mkdir -p "$(dirname "$cache")"
  staged=$(mktemp -d "$cache.XXXXXX")
  mv "$(find_wheel "$build")" "$staged/"
  # Two builders may end at once: the first rename wins, the second wheel is dropped.
  mv -T "$staged" "$cache" 2>/dev/null || rm -rf "$staged"
  wheel=$(find_wheel "$cache")
fi
echo "$wheel"
