# funitel in TGI's container shape: same port, same cache folder, same entry point.
#   docker build -t funitel .                                                       CPU
#   docker build -t funitel:cuda --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#     --build-arg TORCH=cuda .                                                      CUDA
ARG BASE=ubuntu:24.04
FROM ${BASE} AS base
ARG TORCH=cpu

# g++ builds the CPU step on the machine that runs it, for the instructions that machine has.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /usr/src/funitel
COPY . .
RUN PIP_NO_CACHE_DIR=1 scripts/install.sh --torch ${TORCH} --extras server --no-editable /opt/funitel

ENV PATH=/opt/funitel/bin:${PATH} \
    HF_HOME=/data \
    FUNITEL_CACHE=/data/funitel \
    FUNITEL_DEFAULT_HOSTNAME=0.0.0.0 \
    FUNITEL_DEFAULT_PORT=80
VOLUME /data
EXPOSE 80
STOPSIGNAL SIGTERM

# Amazon SageMaker: docker build --target sagemaker
FROM base AS sagemaker
EXPOSE 8080
ENTRYPOINT ["/usr/src/funitel/scripts/sagemaker-entrypoint.sh"]

FROM base
ENTRYPOINT ["text-generation-launcher"]
