#!/usr/bin/env bash
# Checks this machine, installs Tandem for its accelerator, and asks `tandem doctor` for a verdict.
#
#   export DEEPINFER_ACCELERATOR=nvidia   # or ascend, cpu; to be exported when it runs, too
#   ./build.sh            # --check: only look, install nothing
#
# Installs into the environment that is active, else into .venv here. Nothing is compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { echo "build: $*"; }
fail() { echo "build failed: $*" >&2; exit 1; }

only_check=false
for argument in "$@"; do
  case "$argument" in
    --check) only_check=true ;;
    *) fail "unknown argument $argument; there is --check" ;;
  esac
done

# ---------------------------------------------------------------- accelerator
accelerator="${DEEPINFER_ACCELERATOR:-}"
if [ -z "$accelerator" ] || [ "$accelerator" = auto ]; then
  if [ -e /dev/davinci_manager ]; then accelerator=ascend
  elif command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then accelerator=nvidia
  else accelerator=cpu; fi
  say "DEEPINFER_ACCELERATOR is not set; this machine has: $accelerator"
fi
case "$accelerator" in
  cpu) say "accelerator cpu" ;;
  nvidia)
    command -v nvidia-smi > /dev/null || fail "DEEPINFER_ACCELERATOR=nvidia, but there is no \
nvidia-smi: install NVIDIA's driver, or export DEEPINFER_ACCELERATOR=cpu"
    devices="$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1)" ||
      fail "nvidia-smi sees no GPU: $devices"
    say "accelerator nvidia: $(echo "$devices" | sort | uniq -c | sed 's/^ *//' | paste -sd ';' -)"
    ;;
  ascend)
    [ -e /dev/davinci_manager ] || fail "DEEPINFER_ACCELERATOR=ascend, but there is no \
/dev/davinci_manager: install the NPU's driver, or export DEEPINFER_ACCELERATOR=cpu"
    [ -n "${ASCEND_HOME_PATH:-}" ] || fail "ASCEND_HOME_PATH is not set: source CANN's set_env.sh"
    say "accelerator ascend, CANN at $ASCEND_HOME_PATH; Tandem has not been run on one yet"
    ;;
  *) fail "DEEPINFER_ACCELERATOR: '$accelerator' is none of nvidia, ascend, cpu" ;;
esac
export DEEPINFER_ACCELERATOR="$accelerator"

# ---------------------------------------------------------------- machine and Python
[ "$(uname -s)" = Linux ] || fail "Tandem needs Linux; this is $(uname -s)"
python="${PYTHON:-python3}"
command -v "$python" > /dev/null || fail "there is no $python; set PYTHON=/path/to/python3.12"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
case "$version" in
  3.11 | 3.12) say "Python $version, $(command -v "$python")" ;;
  *) fail "Tandem needs Python 3.11 or 3.12; $python is $version: set PYTHON=/path/to/python3.12" ;;
esac
if "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' || [ -n "${CONDA_PREFIX:-}" ]
then
  say "installing into the active environment"
  bin="$(dirname "$(command -v "$python")")"
else
  say "no environment is active: using .venv here"
  bin="$PWD/.venv/bin"
fi
free_gb="$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')"
[ "$free_gb" -ge 8 ] || say "note: $free_gb GB are free here; torch with CUDA takes about 5"
if "$only_check"; then
  say "nothing was installed (--check)"
  exit 0
fi

# ---------------------------------------------------------------- installation
[ -x "$bin/python" ] || "$python" -m venv .venv
"$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots]' ||
  fail "pip could not install; its words are above"
say "installed: $("$bin/python" -c 'import torch; print("torch", torch.__version__)')"
if [ "$accelerator" = ascend ]; then
  "$bin/python" -c 'import torch_npu' 2> /dev/null ||
    fail "torch_npu is not installed: take the wheel of your CANN version from Huawei"
elif [ "$accelerator" = nvidia ]; then
  "$bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "this torch sees no GPU: its CUDA version must be one that the driver supports"
fi
say "asking tandem doctor"
"$bin/tandem" doctor || fail "the doctor found what must be mended first; see above"
say "done; export DEEPINFER_ACCELERATOR=$accelerator wherever it runs"
