# For a machine with NVIDIA's driver 580 or later and its container toolkit:
#
#   docker build -t nvt-torchrec .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v /data:/data nvt-torchrec
#
# which runs `nvt-etl doctor`; any other command goes at the end. --ipc=host: NCCL's ranks and
# Dask's workers share memory. The CUDA libraries and compilers come as wheels, by
# requirements/gpu.txt; of the host it needs the driver alone.
#
# A tag moves: for builds that shall be the same again, take the digest that `docker images --digests`
# shows, with --build-arg BASE=python@sha256:... (none is written here, because nobody has built it
# from one yet).
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# The driver's libraries that NVIDIA's container toolkit puts in: CUDA, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1

# Triton and torch.compile call a C compiler; some of the locked packages come as sources only.
# Debian keeps no old versions, so pins here would fail soon.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/nvt-torchrec

# In the order that `make env` has; a change of the code does not install all of it again.
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt \
 && pip install --no-cache-dir --no-deps --require-hashes -r requirements/torch.txt \
 && pip install --no-cache-dir --no-deps --require-hashes -r requirements/cuda.txt \
 && pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation \
        -r requirements/gpu.txt

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
 && useradd --create-home --uid 1000 trainer \
 && install --directory --owner=trainer build training_log

USER 1000
CMD ["python", "-m", "etl", "doctor"]
