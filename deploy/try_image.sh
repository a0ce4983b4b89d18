#!/usr/bin/env bash
# Serve the default model from an image, as a cluster would: a read-only root, no privileges, no capabilities.
#   deploy/try_image.sh quire:latest
set -euo pipefail
image=$1
name=quire-try-$$
docker run --detach --init --name "$name" --publish 127.0.0.1::8000 \
    --read-only --tmpfs /tmp --tmpfs /cache:uid=10001,gid=10001,exec --shm-size 1g \
    --cap-drop ALL --security-opt no-new-privileges --stop-timeout 100 "$image" >/dev/null
trap 'docker rm --force "$name" >/dev/null' EXIT

state=starting
for _ in $(seq 120); do
    state=$(docker inspect --format '{{if .State.Running}}{{.State.Health.Status}}{{else}}ended{{end}}' "$name")
    [ "$state" = starting ] || break
    sleep 5
done
if [ "$state" != healthy ]; then
    docker logs "$name"
    echo "the server is $state"
    exit 1
fi

address=$(docker port "$name" 8000)
answer=$(curl --fail --silent --max-time 120 "http://$address/v1/completions" \
    --header 'Content-Type: application/json' --data '{"prompt": "The capital of Japan is", "max_tokens": 4}')
echo "$answer"
docker stop "$name" >/dev/null
[ "$(docker inspect --format '{{.State.ExitCode}}' "$name")" = 0 ]
