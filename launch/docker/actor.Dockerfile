# Image of an actor: torch and vLLM, without JAX. Run in the project's folder:
#   docker build -f launch/docker/actor.Dockerfile --build-arg DEVICE=gpu --build-arg SOURCE_COMMIT=$(git rev-parse HEAD) \
#       -t REGISTRY/sluice-actor:TAG .
# DEVICE is gpu (NVIDIA, the extra `actor` of pyproject.toml) or cpu (launch/lock-cpu.txt without JAX).
FROM python:3.11-slim-bookworm
ARG DEVICE=gpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# vLLM compiles kernels at startup; bubblewrap isolates programs that a policy wrote.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc g++ libc6-dev libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sluice
# Dependencies in a separate layer, which is rebuilt only if these two files change.
COPY pyproject.toml launch/lock-cpu.txt ./
RUN if [ "$DEVICE" = cpu ]; then \
        grep -vE '^(jax|jaxlib|flax|grain|optax|orbax-checkpoint)==' lock-cpu.txt > lock-actor.txt \
        && pip install --no-cache-dir --no-deps --extra-index-url "$TORCH_INDEX" -r lock-actor.txt \
        && pip install --no-cache-dir --no-deps -e . ; \
    else pip install --no-cache-dir -e ".[actor]" ; fi

ARG SOURCE_COMMIT=
ENV SLUICE_COMMIT=$SOURCE_COMMIT
COPY actor ./actor
COPY bridge ./bridge
COPY configs ./configs
COPY launch ./launch
COPY learner ./learner
RUN python -m compileall -q actor bridge configs launch learner \
    && python -c "import importlib.util as u, launch.actor, launch.supervision.kubernetes_probe; assert not u.find_spec('jax')"

USER 10001:10001
ENTRYPOINT ["tini", "--", "python"]
CMD ["-m", "launch.actor", "--help"]
