# The learner's image: JAX, and no torch. From the project's folder:
#   docker build -f launch/docker/learner.Dockerfile --build-arg EXTRA=tpu -t REGISTRY/sluice-learner:TAG .
# EXTRA is tpu, cuda (NVIDIA GPUs) or learner (CPU), an extra of pyproject.toml.
FROM python:3.11-slim-bookworm
ARG EXTRA=tpu

# tini hands signals on, and reaps what a process that died has left.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
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
RUN python -m compileall -q actor bridge configs launch learner \
    && python -c "import importlib.util as u, launch.learner, launch.supervision.kubernetes_probe; assert not u.find_spec('torch')"

USER 10001:10001
ENTRYPOINT ["tini", "--", "python"]
CMD ["-m", "launch.learner", "--help"]
