# syntax=docker/dockerfile:1.7
# Pagewood for NVIDIA GPUs, with the embedded model. From the root of the repository:
#   docker build -f deploy/docker/cuda.Dockerfile -t pagewood:cuda .
# The host needs the driver and the NVIDIA container toolkit.
FROM python:3.12-slim-bookworm AS wheels
COPY packages /src/packages
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src/packages/*

# With nvcc and the headers of CUDA: FlashInfer compiles kernels for the GPU that it finds, once for each volume /cache.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ENV PATH=/opt/pagewood/bin:$PATH PIP_NO_CACHE_DIR=1 DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home pagewood \
    && install --directory --owner=pagewood --group=pagewood /cache /batches \
    && python3 -m venv /opt/pagewood
# First what rarely changes and is large, then what depends on the source.
RUN --mount=type=bind,source=constraints.txt,target=/build/constraints.txt \
    pip install --constraint /build/constraints.txt torch flashinfer-python
RUN --mount=type=bind,source=constraints.txt,target=/build/constraints.txt \
    --mount=type=bind,from=wheels,source=/wheels,target=/build/wheels \
    pip install --constraint /build/constraints.txt /build/wheels/*.whl
# Compiled kernels are kept in /cache, those of FlashInfer, too; files of batches, if they are wanted, in /batches.
ENV PAGEWOOD_CACHE=/cache FLASHINFER_WORKSPACE_BASE=/cache
VOLUME ["/cache", "/batches"]
USER 10001:10001
WORKDIR /home/pagewood
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["pagewood"]
CMD ["serve", "--host", "0.0.0.0", "--device", "cuda"]
