# syntax=docker/dockerfile:1.7
# Pagewood for CPUs, with the embedded model. From the root of the repository:
#   docker build -f deploy/docker/cpu.Dockerfile -t pagewood:cpu .
FROM python:3.12-slim-bookworm AS wheels
COPY packages /src/packages
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src/packages/*

FROM python:3.12-slim-bookworm
# The package index of torch has builds without CUDA, which are a fraction as large.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN useradd --uid 10001 --user-group --create-home pagewood \
    && install --directory --owner=pagewood --group=pagewood /cache /batches
# First what rarely changes and is large, then what depends on the source.
RUN --mount=type=bind,source=constraints.txt,target=/build/constraints.txt \
    pip install --no-cache-dir --constraint /build/constraints.txt --extra-index-url "${TORCH_INDEX}" torch
RUN --mount=type=bind,source=constraints.txt,target=/build/constraints.txt \
    --mount=type=bind,from=wheels,source=/wheels,target=/build/wheels \
    pip install --no-cache-dir --constraint /build/constraints.txt --extra-index-url "${TORCH_INDEX}" /build/wheels/*.whl
# Compiled kernels and quantised weights are kept in /cache; files of batches, if they are wanted, in /batches.
ENV PAGEWOOD_CACHE=/cache
VOLUME ["/cache", "/batches"]
USER 10001:10001
WORKDIR /home/pagewood
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["pagewood"]
CMD ["serve", "--host", "0.0.0.0"]
