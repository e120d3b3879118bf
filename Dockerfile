# The server, for a host with or without a GPU. Build: docker build -t sglang-ced .   Run: docs/how-to/run-in-a-container.md
#
# torch's wheels bring CUDA with them, so one image does for both; a GPU host adds its driver (--gpus all).

FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/ced
ENV PATH=/opt/ced/bin:$PATH
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY python python
# The package pins SGLang itself.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[serve]' scikit-build-core==1.1.2 cmake==4.4.5 ninja==1.13.2
# After the line above, so that a change of a kernel does not fetch 11 GB again.
COPY sgl-kernel-ext sgl-kernel-ext
RUN pip install --no-cache-dir --no-build-isolation --no-deps ./sgl-kernel-ext

FROM python:3.11-slim-bookworm
# gcc: Triton compiles its launchers with it. libnuma1, libgomp1: SGLang and torch load them. curl: the health check.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl gcc libc6-dev libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ced
COPY --from=build /opt/ced /opt/ced
ENV PATH=/opt/ced/bin:$PATH \
    CUDA_VISIBLE_DEVICES=
USER 1000
WORKDIR /home/ced
EXPOSE 30000
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m CMD ["curl", "--fail", "--silent", "http://127.0.0.1:30000/health"]
# Options given to `docker run` come instead of CMD; the last --model-path holds.
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--model-path", "/opt/ced/lib/python3.11/site-packages/sglang_ced/assets/ced-tiny"]
