# The stack as an image: the wheel of this checkout and the locked requirements of `make install`.
#   docker build --target cpu  --tag atropos-tui:cpu  .
#   docker build --target cuda --tag atropos-tui:cuda .
# docs/start/install.md says how to start it. Target `base` is the development container.
ARG PYTHON_VERSION=3.12

# gcc and Python's headers: Triton and torch.compile build code at run time. libnuma1: vLLM for the CPU loads it.
# Versions of Debian's packages belong to the base image's release.
FROM python:${PYTHON_VERSION}-slim-bookworm AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ git libnuma1 make openssh-client procps tini \
 && rm -rf /var/lib/apt/lists/*

FROM base AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-deps --wheel-dir /dist .

FROM base AS stack
RUN useradd --create-home --uid 1000 atropos && python -m venv /opt/atropos && mkdir /work && chown atropos /work
ENV PATH=/opt/atropos/bin:$PATH
WORKDIR /work
# The supervisor must not be process 1, whose default is to ignore signals.
ENTRYPOINT ["tini", "--"]
CMD ["atropos-tui", "doctor"]

FROM stack AS cpu
ARG TORCH_VERSION=2.13.0
RUN pip install --no-deps "torch==${TORCH_VERSION}+cpu" --index-url https://download.pytorch.org/whl/cpu
COPY requirements/cpu.txt /tmp/
RUN pip install --no-deps --require-hashes --requirement /tmp/cpu.txt
COPY --from=wheel /dist /tmp/dist
COPY NOTICE /opt/atropos/
RUN pip install --no-deps /tmp/dist/*.whl
USER 1000

FROM stack AS cuda
# What NVIDIA's container runtime makes available; the CUDA libraries themselves come with torch.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY requirements/gpu.txt /tmp/
RUN pip install --no-deps --require-hashes --requirement /tmp/gpu.txt
COPY --from=wheel /dist /tmp/dist
COPY NOTICE /opt/atropos/
RUN pip install --no-deps /tmp/dist/*.whl
USER 1000
