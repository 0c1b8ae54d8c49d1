#!/usr/bin/env bash
# Ranks on several hosts by Horovod's launcher, over Gloo: no MPI is needed.
#
#   launch/horovodrun.sh HOST:SLOTS,... CONFIG [section.key=value ...]
#   INTERFACES=eth0 launch/horovodrun.sh node1:4,node2:4 configs/allreduce.yaml
#   OVER=mpi launch/horovodrun.sh node1:4,node2:4 configs/allreduce.yaml
#
# INTERFACES, separated by commas, lead to the other hosts; without them Horovod looks for them.
# Every host must know the name of every host. The environment must be activated; the hosts have it,
# and the current folder, at the same place, and ssh without a password.
set -euo pipefail

case ${1:-} in
  -h | --help | '')
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

fail() { # what, rule, received, do
  printf 'error: %s\n  rule:     %s\n  received: %s\n  do:       %s\n' "$@" >&2
  exit 2
}

hosts=$1
shift
ranks=0
for host in ${hosts//,/ }; do
  [[ $host =~ ^[A-Za-z0-9._@-]+(:[1-9][0-9]{0,4})?$ ]] || fail "$host is no host" \
    "HOST[:SLOTS],..., SLOTS an integer >= 1 (1)" "$hosts" "for example node1:4,node2:4"
  case $host in
    *:*) ranks=$((ranks + ${host##*:})) ;;
    *) ranks=$((ranks + 1)) ;;
  esac
done

case ${OVER:-gloo} in
  gloo | mpi) ;;
  *) fail "OVER: no such way" "gloo or mpi" "OVER=$OVER" "leave it out, or OVER=mpi" ;;
esac
command -v horovodrun >/dev/null || fail "horovodrun was not found" "it is on PATH" "PATH=$PATH" \
  "activate the environment (source .venv/bin/activate)"
options=("--${OVER:-gloo}" -np "$ranks" -H "$hosts")
if [ -n "${INTERFACES:-}" ]; then
  options+=(--network-interfaces "$INTERFACES")
fi
exec horovodrun "${options[@]}" python -m hvps.train "$@"
