# Image of a machine with learner and engines, for `python -m launch.tools.deploy --one_node`. Run in the project's
# folder:
#   docker build -f launch/docker/node.Dockerfile --build-arg SOURCE_COMMIT=$(git rev-parse HEAD) \
#       -t REGISTRY/sluice-node:TAG .
FROM python:3.11-slim-bookworm
ARG EXTRA=gpu

# vLLM compiles kernels at startup.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc g++ libc6-dev libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sluice
# Dependencies in a separate layer, which is rebuilt only if pyproject.toml changes.
COPY pyproject.toml ./
RUN pip install --no-cache-dir -e ".[${EXTRA}]"

ARG SOURCE_COMMIT=
ENV SLUICE_COMMIT=$SOURCE_COMMIT
COPY actor ./actor
COPY bridge ./bridge
COPY configs ./configs
COPY launch ./launch
COPY learner ./learner
RUN python -m compileall -q actor bridge configs launch learner

USER 10001:10001
ENTRYPOINT ["tini", "--", "python"]
CMD ["-m", "launch.local", "--help"]
