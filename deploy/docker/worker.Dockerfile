# The worker: tensors. It carries torch and the default model; other models come from a volume.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
# For the native operators; the image that is kept has no compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt ./
COPY deploy/docker/install.py deploy/docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    python deploy/docker/install.py tools \
    && python deploy/docker/install.py model /opt/trivet
# What others wrote depends on these files alone, so a change of code leaves its layer as it is.
COPY proto/pyproject.toml proto/
COPY chassis/pyproject.toml chassis/
COPY checkpoint/pyproject.toml checkpoint/
COPY kernels/pyproject.toml kernels/
COPY worker_svc/pyproject.toml worker_svc/
# One more place where pip looks for wheels, for instance an index of torch builds for CPUs alone, which are a tenth of the size.
ARG TORCH_INDEX=""
RUN --mount=type=cache,target=/root/.cache/pip \
    PIP_EXTRA_INDEX_URL="$TORCH_INDEX" python deploy/docker/install.py libraries worker /opt/trivet
COPY proto proto
COPY chassis chassis
COPY checkpoint checkpoint
COPY kernels kernels
COPY worker_svc worker_svc
RUN python deploy/docker/install.py packages worker /opt/trivet

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trivet
COPY --from=build /opt/trivet/libraries /opt/trivet/libraries
COPY --from=build /opt/trivet/model /opt/trivet/model
COPY --from=build /opt/trivet/packages /opt/trivet/packages
ENV PATH=/opt/trivet/libraries/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 7200 7201
STOPSIGNAL SIGTERM
# Live while it loads: how long that takes depends on the model.
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-m", "trivet_chassis.probe", "http://127.0.0.1:7201/health/live"]
ENTRYPOINT ["python", "-m", "trivet_worker"]
