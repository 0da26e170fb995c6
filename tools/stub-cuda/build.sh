#!/bin/sh
# Compiles the stub into the folder $1, and prints the environment variables that let a program find it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/lib" "$1/cuda/include"
out=$(cd "$1" && pwd)
${CC:-cc} -O2 -shared -fPIC -Wall -Wno-unused-parameter -o "$out/lib/libstub_cuda.so" "$here/stub_cuda.c"
for name in libcuda.so.1 libcublasLt.so.13 libcublasLt.so.12 libnvrtc.so libnccl.so.2; do
  ln -sf libstub_cuda.so "$out/lib/$name"
done
# Programs only check that these headers exist. Nothing compiles them.
touch "$out/cuda/include/cuda_fp16.h" "$out/cuda/include/cuda_bf16.h" "$out/cuda/include/mma.h"
echo "LD_LIBRARY_PATH=$out/lib CUDA_PATH=$out/cuda"
