#!/usr/bin/env bash
# Ranks on several hosts by plain mpirun (Open MPI 4.1 or 5), with what `hvps launch` would give it.
#
#   launch/mpirun.sh HOST:SLOTS,... CONFIG [section.key=value ...]
#   NETWORK=10.0.0.0/8 launch/mpirun.sh node1:4,node2:4 configs/allreduce.yaml train.epochs=3
#
# NETWORK is what the hosts reach each other by: a CIDR, or an interface that is named alike on all;
# without it Open MPI tries all, docker0 and the like too. The environment must be activated; the
# hosts have it, and the current folder, at the same place, and ssh without a password.
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

# By its whole path: it need not be on PATH on the other hosts.
program=$(command -v mpirun) || fail "mpirun was not found" "it is on PATH" "PATH=$PATH" \
  "activate the environment (source .venv/bin/activate)"
[[ $("$program" --version 2>&1) =~ Open ]] || fail "$program is not Open MPI" \
  "the options here are those of Open MPI" "another MPI" "use hvps launch -H $hosts"
options=(--prefix "$(dirname "$(dirname "$program")")" -np "$ranks" -H "$hosts" --map-by slot
  # TensorFlow's threads need all cores that a rank may use.
  --bind-to none
  # More ranks than cores are slow, but no mistake.
  --oversubscribe)
# Settings by the names of Open MPI 4 and of 5. ssh shall never ask for a password.
ssh="ssh -o BatchMode=yes -o ConnectTimeout=8"
export OMPI_MCA_plm_rsh_agent=$ssh PRTE_MCA_plm_ssh_agent=$ssh
if [ -n "${NETWORK:-}" ]; then
  export OMPI_MCA_btl_tcp_if_include=$NETWORK OMPI_MCA_oob_tcp_if_include=$NETWORK
  export PRTE_MCA_prte_if_include=$NETWORK
fi
if [ "$(id -u)" -eq 0 ]; then # in a container
  options+=(--allow-run-as-root)
fi
# Not the whole environment: HOSTNAME, DISPLAY or CUDA_VISIBLE_DEVICES belong to one host. Those of
# OMPI_MCA_* Open MPI forwards itself.
for name in $(compgen -e); do
  case $name in
    TF_CONFIG | HOROVOD_RANK | HOROVOD_SIZE) ;;
    PATH | PYTHONPATH | LD_LIBRARY_PATH | LANG | HVPS_* | HOROVOD_* | NCCL_* | TF_* | OMP_*)
      options+=(-x "$name")
      ;;
  esac
done
exec "$program" "${options[@]}" python -m hvps.train "$@"
