# funitel in TGI's container shape: same port, same cache folder, same entry point (docs/docker.md).
#   docker build -t funitel .                                                       CPU
#   docker build -t funitel:cuda --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#     --build-arg TORCH=cuda .                                                      CUDA
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/*.log

# What compiles and installs stays behind in this stage. `--secret id=pip,src=pip.conf` gives it settings of pip.
FROM base AS builder
ARG TORCH=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 scripts/install.sh --torch ${TORCH} --extras server,otlp,oidc --no-editable /opt/funitel
# On a read-only root, what is not compiled to bytecode here would be at every start. Some files of libraries cannot be.
RUN /opt/funitel/bin/python -m compileall -qq /opt/funitel/lib || true

FROM base AS serving
ARG TORCH=cpu
# Triton compiles a module of its own at its first start.
RUN [ "${TORCH}" != cuda ] || { apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev && rm -rf /var/lib/apt/lists/*; }
COPY --from=builder /opt/funitel /opt/funitel
# Any other user id works as well, with group 0 as on OpenShift: what has to be written has that group.
RUN mkdir --mode=2775 /data && chown 1000:0 /data
ENV PATH=/opt/funitel/bin:${PATH} \
    HOME=/tmp \
    HF_HOME=/data \
    FUNITEL_DEFAULT_CACHE=/data/funitel \
    FUNITEL_DEFAULT_HOSTNAME=0.0.0.0 \
    FUNITEL_DEFAULT_PORT=80 \
    FUNITEL_ADDRESS_FILE=/tmp/funitel-address
USER 1000:0
VOLUME /data
STOPSIGNAL SIGTERM
# A model may take an hour to download; a container that has become healthy leaves the start period at once.
HEALTHCHECK --start-period=1h --interval=30s --timeout=10s --retries=3 \
    CMD exec python -m funitel.launcher.health_check "$FUNITEL_ADDRESS_FILE"
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=funitel \
      org.opencontainers.image.description="LLM server with the interface of text-generation-inference" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION}

# Amazon SageMaker: docker build --target sagemaker
FROM serving AS sagemaker
COPY scripts/sagemaker-entrypoint.sh /usr/local/bin/
EXPOSE 8080
ENTRYPOINT ["sagemaker-entrypoint.sh"]

FROM serving
EXPOSE 80
ENTRYPOINT ["text-generation-launcher"]
