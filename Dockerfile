# The image of every node, and a server by itself:
#
#   docker build -t serve-app .                              # for CPUs
#   docker build -t serve-app --build-arg TORCH=cu130 .      # for GPUs (any backend that `uv pip install --torch-backend` knows)
#   docker run --rm --init --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 --shm-size 2g -v serve-app:/state serve-app
#
# Packages are those of requirements/: by hash, but for uv and torch, whose builds differ, by version. Nothing in it is written while it runs but /state and /tmp, and nobody is root.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# g++ compiles the CPU kernels and Triton's launchers; wget is what KubeRay's probes call.
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.9

WORKDIR /srv/serve-app
ARG TORCH=cpu
COPY requirements requirements
# Compiled here: nobody can write bytecode later, and every process would compile what it imports.
RUN uv venv .venv \
    && uv pip install --no-cache --compile-bytecode --require-hashes -r requirements/lock.txt -r requirements/s3.txt \
    && uv pip install --no-cache --compile-bytecode --torch-backend=${TORCH} -r requirements/torch.txt
COPY . .
RUN uv pip install --no-cache --no-build-isolation --no-deps --editable . \
    && .venv/bin/python -m compileall -q serve_app deployments training benchmarks

# Everybody may read and nobody else write. Only files that need it are touched: the others would lie in the image twice.
RUN useradd --uid 1000 --no-create-home --home-dir /state/user user \
    && install -d -o user -g user -m 700 /state /state/user \
    && find . ! -type l \( -perm /022 -o ! -perm -444 -o -type d ! -perm -555 \) -exec chmod a+rX,go-w {} +
ENV PATH=/srv/serve-app/.venv/bin:$PATH HOME=/state/user SERVE_APP_HOME=/state/user/serve-app HF_HOME=/state/weights \
    TRITON_CACHE_DIR=/state/triton PYTHONDONTWRITEBYTECODE=1 SERVE_APP_HOST=0.0.0.0
USER 1000
VOLUME /state
EXPOSE 8000
CMD ["serve-app", "serve"]
