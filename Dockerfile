# Trains on NVIDIA GPUs, or without any on CPUs. Built in the checkout:
#   docker build --tag trainer .
#   docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" --volume ./runs:/trainer/runs trainer train --gpus 8 +config=llama3_8b
# Runs as the user `trainer`, or as any other that --user names: who has to be able to write what is mounted on /trainer/runs.
# torch brings the CUDA libraries that it was built with; of the base image it is the driver's interface that counts.
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${BASE}

# Compilers: Triton and torch.compile call them while a run lasts. InfiniBand's user libraries: NCCL loads them.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
      python3 python3-dev python3-venv gcc g++ libibverbs1 ibverbs-providers \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv \
 && useradd --uid 10001 --home-dir /trainer trainer \
 && mkdir --mode 777 /trainer
ENV PATH=/opt/venv/bin:$PATH HOME=/trainer USER=trainer PYTHONUNBUFFERED=1

COPY pyproject.toml setup.py README.md LICENSE /opt/trainer/
COPY trainer /opt/trainer/trainer
COPY configs /opt/trainer/configs
RUN pip install --no-cache-dir '/opt/trainer[plots,tensorboard,gpu,s3]'

USER trainer
WORKDIR /trainer
ENTRYPOINT ["trainer"]
CMD ["--help"]
