# Quire in an image: see docs/operations/containers.md.
#   docker build -t quire .                                for CPUs
#   docker build -t quire:cuda --build-arg EXTRAS=cuda .   for NVIDIA GPUs; the CUDA libraries come with JAX
# BASE is any image of Debian or Ubuntu with Python 3.11 or newer and its venv module.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=""
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Dependencies before code: this layer is made again only when they change.
COPY pyproject.toml deploy/dependencies.py ./
RUN python3 -m venv /opt/quire \
    && python3 dependencies.py "${EXTRAS}" > dependencies.txt \
    && /opt/quire/bin/pip install --no-cache-dir -r dependencies.txt
# The C++ kernels are built here, for every level of instructions, so that no compiler is needed to serve.
COPY setup.py README.md LICENSE ./
COPY quire ./quire
RUN QUIRE_BUILD_AHEAD=1 /opt/quire/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y ca-certificates libstdc++6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /cache quire \
    && install -d -o quire -g quire /cache
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    QUIRE_CACHE_DIR=/cache \
    QUIRE_HOST=0.0.0.0 \
    PORT=8000
USER 10001:10001
VOLUME /cache
EXPOSE 8000
# A first start fetches and compiles; it is live meanwhile, and healthy when it answers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --start-interval=5s --retries=3 \
    CMD ["python", "-m", "quire.server.health_check"]
ENTRYPOINT ["quire", "serve"]
