# syntax=docker/dockerfile:1
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# The caches stay on the machine that builds; without them, each change would compile every dependency again.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin shardcron && cp target/release/shardcron /usr/local/bin/shardcron

# Debian's glibc of the same release as the builder's. There is nothing else to install: SQLite is compiled in, and no part
# of this version speaks TLS.
FROM debian:bookworm-slim
RUN useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/shardcron shardcron
COPY --from=build /usr/local/bin/shardcron /usr/local/bin/shardcron
USER 10001:10001
# Where an embedded ledger (sqlite://shardcron.db) is, if nothing else is configured.
WORKDIR /var/lib/shardcron
EXPOSE 8081
# As process 1 it takes SIGTERM itself: it drains, and a second one ends it at once.
STOPSIGNAL SIGTERM
ENTRYPOINT ["shardcron"]
CMD ["up"]
