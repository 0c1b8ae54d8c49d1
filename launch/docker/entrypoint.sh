#!/bin/sh
# Starts its arguments, after the names in HVPS_PEERS can be resolved: a pod's DNS record may come
# seconds after the pod, and mpirun and TensorFlow give up at once on a name that is not there.
#   HVPS_PEERS          names or addresses, separated by spaces or commas; :port is ignored
#   HVPS_PEERS_TIMEOUT  seconds to wait for all of them (120)
set -eu

timeout=${HVPS_PEERS_TIMEOUT:-120}
case $timeout in
  '' | *[!0-9]*)
    echo "hvps-entrypoint: error: HVPS_PEERS_TIMEOUT is not a number of seconds" >&2
    echo "  rule:     an integer >= 0" >&2
    echo "  received: $timeout" >&2
    echo "  do:       for example HVPS_PEERS_TIMEOUT=120" >&2
    exit 1
    ;;
esac

deadline=$(($(date +%s) + timeout))
set -f # a name is not a pattern of files
for peer in $(printf '%s' "${HVPS_PEERS:-}" | tr ',' ' '); do
  case $peer in
    *:*:*) name=$peer ;; # an IPv6 address
    *) name=${peer%%:*} ;;
  esac
  until getent hosts "$name" >/dev/null; do
    if [ "$(date +%s)" -ge "$deadline" ]; then
      echo "hvps-entrypoint: error: the name $name cannot be resolved" >&2
      echo "  rule:     every name in HVPS_PEERS resolves within HVPS_PEERS_TIMEOUT = $timeout s" >&2
      echo "  received: HVPS_PEERS=$HVPS_PEERS" >&2
      echo "  do:       start that host, correct its name (Kubernetes: pod.service), or raise HVPS_PEERS_TIMEOUT" >&2
      exit 1
    fi
    sleep 1
  done
done

if [ "$#" -eq 0 ]; then
  echo "hvps-entrypoint: error: no command was given" >&2
  echo "  do:       for example: python -m hvps.train configs/local.yaml" >&2
  exit 1
fi
exec "$@"
