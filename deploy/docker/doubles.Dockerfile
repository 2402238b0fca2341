# The mock worker: the real protocol, no model that is computed, no torch. For trying out what stands around workers.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY constraints.txt ./
COPY deploy/docker/install.py deploy/docker/
RUN --mount=type=cache,target=/root/.cache/pip python deploy/docker/install.py tools
# What others wrote depends on these files alone, so a change of code leaves its layer as it is.
COPY proto/pyproject.toml proto/
COPY chassis/pyproject.toml chassis/
COPY checkpoint/pyproject.toml checkpoint/
COPY doubles/pyproject.toml doubles/
RUN --mount=type=cache,target=/root/.cache/pip python deploy/docker/install.py libraries doubles /opt/trivet
COPY proto proto
COPY chassis chassis
COPY checkpoint checkpoint
COPY doubles doubles
RUN python deploy/docker/install.py packages doubles /opt/trivet

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trivet
COPY --from=build /opt/trivet/libraries /opt/trivet/libraries
COPY --from=build /opt/trivet/packages /opt/trivet/packages
ENV PATH=/opt/trivet/libraries/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 7200 7201
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "trivet_chassis.probe", "http://127.0.0.1:7201/health/live"]
ENTRYPOINT ["python", "-m", "trivet_doubles.mock_worker"]
