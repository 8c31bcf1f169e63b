# The image of one machine with learner and engines, for `python -m launch.tools.deploy --one_node`. From the project's folder:
#   docker build -f launch/docker/node.Dockerfile -t REGISTRY/sluice-node:TAG .
FROM python:3.11-slim-bookworm
ARG EXTRA=gpu

# vLLM compiles kernels when it starts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc g++ libc6-dev libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sluice
# What it needs, in a layer of its own: it stays as long as pyproject.toml does.
COPY pyproject.toml ./
RUN pip install --no-cache-dir -e ".[${EXTRA}]"

COPY actor ./actor
COPY bridge ./bridge
COPY configs ./configs
COPY launch ./launch
COPY learner ./learner
RUN python -m compileall -q actor bridge configs launch learner

USER 10001:10001
ENTRYPOINT ["tini", "--", "python"]
CMD ["-m", "launch.local", "--help"]
