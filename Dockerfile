# Images with the commands `burn-megatron` and `burn-megatron-bench`.
#
#   docker build -t burn-megatron .
#   docker run --rm -it -u "$(id -u):$(id -g)" -v "$PWD:/workspace" burn-megatron pretrain --data my.txt
#
#   docker build --target cuda -t burn-megatron:cuda .
#   docker run --rm -it --gpus all -u "$(id -u):$(id -g)" -v "$PWD:/workspace" burn-megatron:cuda env

# The same version as in rust-toolchain.toml. Otherwise rustup would install a second toolchain.
FROM rust:1.95.0-slim-bookworm AS source
WORKDIR /src
COPY . .

FROM source AS build-cpu
RUN cargo build --release --locked --package burn-megatron-cli --package burn-megatron-bench

# CubeCL's build scripts download and unpack LLVM.
FROM source AS build-cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates curl g++ libzstd-dev xz-utils zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
RUN cargo build --release --locked --package burn-megatron-cli --package burn-megatron-bench --features cuda

# At run time, the driver comes from the host. NVRTC, the headers that kernels include, cuBLASLt and NCCL come from the
# image.
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04 AS cuda
COPY --from=build-cuda /src/target/release/burn-megatron /src/target/release/burn-megatron-bench /usr/local/bin/
COPY --from=source /src/LICENSE-MIT /src/LICENSE-APACHE /usr/local/share/doc/burn-megatron/
ENV CUDA_PATH=/usr/local/cuda
WORKDIR /workspace
ENTRYPOINT ["burn-megatron"]

# The last stage is the default target.
FROM debian:bookworm-slim AS cpu
COPY --from=build-cpu /src/target/release/burn-megatron /src/target/release/burn-megatron-bench /usr/local/bin/
COPY --from=source /src/LICENSE-MIT /src/LICENSE-APACHE /usr/local/share/doc/burn-megatron/
WORKDIR /workspace
ENTRYPOINT ["burn-megatron"]
