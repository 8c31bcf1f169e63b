# Image of the learner: JAX, without torch. Run in the project's folder:
#   docker build -f launch/docker/learner.Dockerfile --build-arg EXTRA=tpu --build-arg SOURCE_COMMIT=$(git rev-parse HEAD) \
#       -t REGISTRY/sluice-learner:TAG .
# EXTRA is tpu, cuda (NVIDIA GPUs) or learner (CPU), an extra of pyproject.toml.
FROM python:3.11-slim-bookworm
ARG EXTRA=tpu

# pycosat, which reasoning-gym needs, has no wheel; tini forwards signals and reaps orphaned processes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
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
RUN python -m compileall -q actor bridge configs launch learner \
    && python -c "import importlib.util as u, launch.learner, launch.supervision.kubernetes_probe; assert not u.find_spec('torch')"

USER 10001:10001
ENTRYPOINT ["tini", "--", "python"]
CMD ["-m", "launch.learner", "--help"]
