#!/usr/bin/env bash
# Measures burn-megatron on the NVIDIA GPU of this machine. See docs/src/gpu.md, or: bash gpu-kit.sh --help
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for python in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python3}" python3 /usr/bin/python3; do
  if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
    PYTHONDONTWRITEBYTECODE=1 exec "$python" "$folder/kit" "$@"
  fi
done
echo "gpu-kit.sh requires Python 3.8 or newer: set PYTHON to its path" >&2
exit 1
