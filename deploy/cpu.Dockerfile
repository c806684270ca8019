# Scoring with a bundle on CPUs: the packages of the extra [serve], no training, no card.
#
#   docker build -f deploy/cpu.Dockerfile --build-arg TORCH=PAGE -t nvt-serve .
#   docker run --rm -p 127.0.0.1:8000:8000 -v /srv/SERVED:/SERVED:ro nvt-serve
#
# PAGE is the URL of the page that lists PyTorch's builds for CPUs (they are not on PyPI); without it
# the image holds the libraries of a card, too, 3 GB more. SERVED is the directory of
# `nvt-infer publish`. Put nginx in front of it: deploy/nginx.conf.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH=

# Compiled code must run on the CPU of any host, not only on that of the one that builds the image.
ENV PYTHONUNBUFFERED=1 \
    NUMBA_CPU_NAME=x86-64-v3 \
    NUMBA_CPU_FEATURES=""

WORKDIR /opt/nvt-torchrec
# Every file is one of the locks', by its digest.
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
# Compiled by the user that runs it: Numba reads no cache that it cannot write.
RUN python -c 'import nvt_torchrec.workflows.compiled'
EXPOSE 8000
CMD ["nvt-infer", "serve", "--bundle", "/SERVED/current", "--host", "0.0.0.0"]
