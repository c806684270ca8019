# Serve a bundle on CPUs: an image with the packages of the extra [serve], without training and GPU.
#
#   docker build -f deploy/cpu.Dockerfile --build-arg TORCH=PAGE -t nvt-serve .
#   docker run --rm -p 127.0.0.1:8000:8000 -v /srv/SERVED:/SERVED:ro nvt-serve
#
# PAGE is the URL of the page that lists PyTorch's builds for CPUs, which are not on PyPI. Without it,
# the image also contains the GPU libraries, 3 GB more. SERVED is the directory of `nvt-infer
# publish`. Put nginx in front of the server: deploy/nginx.conf.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH=

# Numba's compiled code must run on the CPU of any host, not only of the host that builds the image.
ENV PYTHONUNBUFFERED=1 \
    NUMBA_CPU_NAME=x86-64-v3 \
    NUMBA_CPU_FEATURES=""

WORKDIR /opt/nvt-torchrec
# pip only installs files whose digests are in the lock files.
ARG LOCKED="pip install --no-cache-dir --no-deps --require-hashes"
COPY requirements requirements
RUN $LOCKED -r requirements/build.txt \
 && $LOCKED ${TORCH:+--no-index --find-links "${TORCH}"} -r requirements/torch.txt \
 && if [ -z "${TORCH}" ]; then $LOCKED -r requirements/cuda.txt; fi \
 && $LOCKED -r requirements/serve.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
 && useradd --create-home --uid 1000 server

USER 1000
WORKDIR /home/server
# Compile as the user that runs the server: Numba ignores a cache that it cannot write.
RUN python -c 'import nvt_torchrec.workflows.compiled'
EXPOSE 8000
CMD ["nvt-infer", "serve", "--bundle", "/SERVED/current", "--host", "0.0.0.0"]
