# Scoring with a bundle on CPUs: the packages of the extra [serve], no training, no card.
#
#   docker build -f deploy/cpu.Dockerfile --build-arg TORCH=URL -t nvt-serve .
#   docker run --rm -p 127.0.0.1:8000:8000 -v /srv/SERVED:/SERVED:ro nvt-serve
#
# URL is the wheel of PyTorch's build for CPUs (it is not on PyPI); without it the image holds the
# libraries of a card, too, 3 GB more. SERVED is the directory of `nvt-infer publish`.
# Put nginx in front of it: deploy/nginx.conf.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH=torch==2.13.0

# Compiled code must run on the CPU of any host, not only on that of the one that builds the image.
ENV PYTHONUNBUFFERED=1 \
    NUMBA_CPU_NAME=x86-64-v3 \
    NUMBA_CPU_FEATURES=""

WORKDIR /opt/nvt-torchrec
RUN pip install --no-cache-dir "${TORCH}"
COPY . .
# The versions are those of the lock.
RUN sed -n 's/^\([a-zA-Z0-9._-]*==[^ ]*\).*/\1/p' requirements/cpu.txt > /tmp/versions \
 && pip install --no-cache-dir --constraint /tmp/versions '.[serve]' \
 && useradd --create-home --uid 1000 server

USER 1000
WORKDIR /home/server
# Compiled by the user that runs it: Numba reads no cache that it cannot write.
RUN python -c 'import nvt_torchrec.workflows.drift'
EXPOSE 8000
CMD ["nvt-infer", "serve", "--bundle", "/SERVED/current", "--host", "0.0.0.0"]
