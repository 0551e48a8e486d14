# An image for drivers and workers: textmill with its kernels compiled, Dask, and S3.
#   docker build -t mill .
#   docker run mill textmill run --root s3://bucket/root …
#   docker run mill dask worker tcp://SCHEDULER:8786 --nthreads 16
FROM python:3.12-slim

WORKDIR /opt/textmill
COPY pyproject.toml README.md LICENSE ./
COPY lm lm
COPY tasks tasks
COPY flows flows
COPY textmill textmill
RUN pip install --no-cache-dir '.[dask,s3]'

# The compiled kernels depend on the CPU. On another kind of CPU, a container compiles them again when it starts.
ENV XDG_CACHE_HOME=/var/cache DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false
RUN cd / && python -m lm.compile_kernels

WORKDIR /work
CMD ["textmill", "--help"]
